"""The round-vectorised simulation: against formulas, and against a plain loop over ranks."""

import math

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.errors import ArgumentError
from pycoll.schedule.cost.simulate import Link, simulate

EVERY = [
    pytest.param(a, n, id=f"{a.collective}-{a.name}-{n}")
    for a in ALGORITHMS
    for n in (2, 5, 6, 8)
    if a.worlds(n)
]
LINK = Link(alpha=3e-6, beta=2e-10, gamma=1e-10)


def scalar(values, rank):
    """One rank's entry of a vector, or the number itself."""
    return values[rank] if np.ndim(values) else values


def reference(schedule, nbytes, link, start, noise):
    """Simulate with one rank and one operand at a time."""
    n, unit = schedule.n, nbytes / schedule.chunks
    time = list(start)
    for number, folds in enumerate(schedule.rounds(np.arange(n))):
        moves = []
        sent, received = ([[0] * n, [0] * n] for _ in range(2))  # the second: behind a fold
        for f in folds:
            own = []
            for owner in range(n):
                count = scalar(f.count, owner) if scalar(f.where, owner) else 0
                sources = [scalar(p.rank, owner) % n for p in f.srcs]
                targets = [scalar(p.rank, owner) % n for p in f.dsts]
                own += [(owner, count, sources, targets)] if count else []
            late = int(any(s != owner for owner, _, sources, _ in own for s in sources))
            moves += [(*move, late) for move in own]
        for owner, count, sources, targets, late in moves:
            messages = [(s, owner, 0) for s in sources] + [(owner, t, late) for t in targets]
            for src, dst, phase in messages:
                sent[phase][src] += count * (src != dst)
                received[phase][dst] += count * (src != dst)
        after = [
            t + sum(link.alpha + link.beta * unit * s for s in both if s)
            for t, both in zip(time, zip(*sent, strict=True), strict=True)
        ]
        for owner, count, sources, targets, late in moves:

            def travel(src, dst, phase):
                port = max(sent[phase][src], received[phase][dst])  # noqa: B023
                return (src != dst) * (link.alpha + link.beta * unit * port)

            done = max(max(time[owner], time[s]) + travel(s, owner, 0) for s in sources)
            done += link.gamma * unit * count * (len(sources) - 1) + noise[number % 3][owner]
            after[owner] = max(after[owner], done)
            for t in targets:
                if t != owner:
                    after[t] = max(after[t], max(done, time[t]) + travel(owner, t, late))
        time = after
    return time


@pytest.mark.parametrize(("algorithm", "n"), EVERY)
def test_vectors_equal_the_plain_loop(algorithm, n):
    rng = np.random.default_rng(n)
    start, noise = rng.random(n) * 1e-4, rng.random((3, n)) * 1e-5
    schedule = algorithm.schedule(n)
    got = simulate(schedule, 1e5, LINK, start=start, noise=lambda r: noise[r % 3])
    assert np.allclose(got, reference(schedule, 1e5, LINK, start, noise), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("algorithm", "n"), EVERY)
def test_one_rank_stands_for_all_where_all_are_alike(algorithm, n):
    start = np.full(n, 1e-5)
    schedule = algorithm.schedule(n)
    got = simulate(schedule, 1e5, LINK, start=start)
    want = reference(schedule, 1e5, LINK, start, np.zeros((3, n)))
    assert np.allclose(got, want, rtol=1e-12, atol=0)


def test_a_ring_of_65536_ranks():
    """It has 131,070 rounds; its plan is one over messages, whose steps nobody counts."""
    n = 1 << 16
    schedule = find("all_reduce", "ring").schedule(n)
    finish = simulate(schedule, 1e9, LINK)
    want = (n - 1) * (2 * (LINK.alpha + 1e9 / n * LINK.beta) + 1e9 / n * LINK.gamma)
    assert np.allclose(finish, want, rtol=1e-9)


def test_ring_takes_what_the_formula_says():
    n, nbytes = 4096, 1e8
    finish = simulate(find("all_reduce", "ring").schedule(n), nbytes, LINK)
    block = nbytes / n
    want = (n - 1) * (2 * (LINK.alpha + block * LINK.beta) + block * LINK.gamma)
    assert np.allclose(finish, want, rtol=1e-9)


def test_halving_doubling_at_65536():
    n, nbytes = 1 << 16, 1e9
    finish = simulate(find("all_reduce", "halving_doubling").schedule(n), nbytes, LINK)
    part = (n - 1) / n * nbytes
    want = 2 * math.log2(n) * LINK.alpha + part * (2 * LINK.beta + LINK.gamma)
    assert np.allclose(finish, want, rtol=1e-9)


def test_a_root_serves_one_byte_after_the_other():
    finish = simulate(find("broadcast", "direct").schedule(9), 1e6, LINK)
    assert np.allclose(finish, LINK.alpha + 8e6 * LINK.beta)


def test_a_pipeline_overlaps():
    chain = find("broadcast", "ring")
    for k in (1, 8):
        finish = simulate(chain.schedule(6, k=k), 1e6, LINK)
        assert math.isclose(finish.max(), (4 + k) * (LINK.alpha + 1e6 / k * LINK.beta))


def test_a_straggler_delays_everybody():
    schedule = find("all_reduce", "recursive_doubling").schedule(64)
    plain = simulate(schedule, 1e4, LINK)
    start = np.zeros(64)
    start[17] = 1.0
    assert np.all(simulate(schedule, 1e4, LINK, start=start) >= 1.0)
    assert start[17] == 1.0
    assert plain.max() < 1.0


def test_noise_adds_up_along_the_critical_path():
    schedule = find("all_reduce", "ring").schedule(8)
    plain = simulate(schedule, 1e4, LINK)
    seen = []
    noisy = simulate(schedule, 1e4, LINK, noise=lambda r: seen.append(r) or np.full(8, 1e-3))
    assert seen == list(range(14))
    assert np.allclose(noisy - plain, 14e-3)


def test_starts_for_another_world_are_refused():
    with pytest.raises(ArgumentError, match=r"\(3,\).*\(4,\)"):
        simulate(find("all_reduce", "ring").schedule(4), 8, start=np.zeros(3))
