"""Proofs of large worlds: the same as whole ones where both are possible; mutants rejected."""

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.errors import ScheduleError
from pycoll.schedule.ir import ACC, IN, OUT, TMP, algorithm, at, fold, in_turn
from pycoll.schedule.lowering.messages import message_plan
from pycoll.schedule.lowering.plan import Opcode
from pycoll.schedule.proof import columns
from pycoll.schedule.proof.columns import SAMPLE, check_columns
from pycoll.schedule.proof.large import prove_large
from pycoll.schedule.proof.symmetry import _Rank, prove_symmetric, rotational
from pycoll.schedule.proof.verify import prove

# A chunk of 64 that is not in the sample.
UNSEEN = int(np.setdiff1d(np.arange(64), np.random.default_rng(0).choice(64, SAMPLE, False))[0])
EVERY = [
    pytest.param(a, n, id=f"{a.collective}-{a.name}-{n}")
    for a in ALGORITHMS
    for n in (2, 3, 8, 11)
    if a.worlds(n)
]


@pytest.mark.parametrize(("algorithm", "n"), EVERY)
def test_they_find_what_the_whole_proof_finds(algorithm, n):
    schedule = algorithm.schedule(n)
    want = prove(schedule)
    got = check_columns(schedule)
    assert (got.rounds, got.sent, got.roundings) == (want.rounds, want.bytes_sent, want.roundings)
    assert got.chunks == schedule.chunks
    if want.order and want.order != "rank":
        assert got.tree == (want.order == "tree")
    if rotational(schedule):
        got = prove_symmetric(schedule)
        assert (got.rounds, got.roundings) == (want.rounds, want.roundings)
        assert got.sent / n == want.bytes_sent


@pytest.mark.parametrize(
    ("collective", "name"),
    [
        ("all_reduce", "ring"),
        ("all_reduce", "circulant"),
        ("reduce_scatter", "circulant"),
        ("all_gather", "bruck"),
        ("all_to_all", "pairwise"),
    ],
)
def test_symmetry_at_300_ranks(collective, name):
    proof = prove_large(find(collective, name).schedule(300))
    assert proof.how == "symmetry"
    assert proof.bytes_sent >= 299 / 300


def test_a_sample_says_so(monkeypatch):
    monkeypatch.setattr(columns, "MOST_CELLS", 1 << 16)
    proof = prove_large(find("all_reduce", "halving_doubling").schedule(512))
    assert proof.how == f"{SAMPLE} of 512 chunks"
    assert (proof.rounds, proof.order, proof.roundings) == (18, "tree", 9)


def ring_with(mistake):
    """A ring all-reduce with one mistake."""

    @algorithm("all_reduce", "mutant")
    def mutant(rank, n):
        left = rank - 1

        def add(step):
            chunk = left - step - 1 + (mistake == "chunk")
            own = at(rank, IN, chunk + (mistake == "mixed"))
            to = at(rank, OUT, chunk)
            return fold([at(left, ACC, chunk), own], to=to)

        def pass_on(step):
            ahead = left - step + (mistake == "passed on")
            return fold(at(left, OUT, left - step), to=at(rank, OUT, ahead))

        both = [at(rank, OUT, rank), at(rank, IN, rank)]
        yield in_turn(range(n - 1 - (mistake == "short")), add)
        if mistake == "twice":
            yield fold(both, to=at(rank, OUT, rank))
        yield in_turn(range(n - 1 - (mistake == "less")), pass_on)

    return mutant


@pytest.mark.parametrize("mistake", ["chunk", "mixed", "passed on", "short", "less", "twice"])
def test_a_mistake_that_all_ranks_make_is_found(mistake):
    schedule = ring_with(mistake).schedule(100)
    assert rotational(schedule)
    with pytest.raises(ScheduleError):
        prove_large(schedule)
    with pytest.raises(ScheduleError):
        check_columns(schedule)


def test_the_same_without_a_mistake_is_right():
    assert prove_large(ring_with("").schedule(100)).how == "symmetry"


@pytest.mark.parametrize("chunk", [None, UNSEEN])
def test_a_mistake_of_one_rank_takes_the_symmetry_away(chunk, monkeypatch):
    """One in all chunks is found; one in a single chunk at least is no longer called proven."""

    @algorithm("all_reduce", "mutant")
    def mutant(rank, n):
        left = rank - 1
        for step in range(n - 1):
            c = left - step - 1
            spoilt = (rank == 5) & (True if chunk is None else c % n == chunk)
            both = [at(left, ACC, c), at(rank, IN, c)]
            yield [
                fold(both, to=at(rank, OUT, c), where=np.logical_not(spoilt)),
                fold(both[::-1][:1], to=at(rank, OUT, c), where=spoilt),
            ]
        for step in range(n - 1):
            yield fold(at(left, OUT, left - step), to=at(rank, OUT, left - step))

    schedule = mutant.schedule(64)
    assert not rotational(schedule)
    with pytest.raises(ScheduleError, match="each contribution once"):
        prove_large(schedule)  # small enough to run all chunks
    monkeypatch.setattr(columns, "MOST_CELLS", 1 << 13)
    sampled = f"{SAMPLE} of 64 chunks"
    if chunk is None:
        with pytest.raises(ScheduleError, match="each contribution once"):
            prove_large(schedule)
    else:  # this one is not in the sample
        assert prove_large(schedule).how == sampled


def test_folds_that_disturb_each_other_are_found():
    @algorithm("broadcast", "race", chunks=1, slots=1, root=0)
    def race(rank, n, root):
        to = at(rank, TMP)
        yield [fold(at(root, IN), to=to), fold(at(rank + 1, TMP), to=at(rank, OUT))]

    with pytest.raises(ScheduleError, match=r"one fold writes|nobody has written"):
        check_columns(race.schedule(4))


def changed(plan, change):
    code, operands = plan.code.copy(), plan.operands.copy()
    change(code, operands)
    return type(plan)(plan.schedule, 0, code, operands, plan.slots, False, messages=True)


def first(code, op, which=2):
    return np.flatnonzero(code["op"] == op)[which]


def no_receive(code, operands):
    code["op"][first(code, Opcode.RECV.value)] = Opcode.SEND.value


def other_peer(code, operands):
    code["peer"][first(code, Opcode.RECV.value)] = 3


def no_wait(code, operands):
    i = first(code, Opcode.WAIT.value)
    code[i] = code[i - 1]


def fold_of_one(code, operands):
    code["nsrc"][first(code, Opcode.FOLD.value)] = 1


def other_chunk(code, operands):
    place = code["arg"][first(code, Opcode.SEND.value)]
    operands["chunk"][place] = (operands["chunk"][place] + 1) % 16


def into_input(code, operands):
    i = first(code, Opcode.RECV.value, -1)
    operands["buffer"][code["arg"][i]] = 0


def beyond(code, operands):
    operands["chunk"][code["arg"][first(code, Opcode.RECV.value, -1)]] = 16


@pytest.mark.parametrize(
    "change", [no_receive, other_peer, no_wait, fold_of_one, other_chunk, into_input, beyond]
)
def test_a_wrong_plan_is_found(change):
    plan = message_plan(find("all_reduce", "ring").schedule(16), 0)
    _Rank(plan, False).run()
    with pytest.raises(ScheduleError, match="messages, IN and OUT apart"):
        _Rank(changed(plan, change), False).run()


def test_what_is_too_large_is_refused():
    with pytest.raises(ScheduleError, match="Prove a smaller world"):
        check_columns(find("reduce_scatter", "halving").schedule(1 << 14))
    with pytest.raises(ScheduleError, match="pieces in a round"):
        check_columns(find("scan", "direct").schedule(1024))
