"""Networks: every link of every message by a walk, and times of all algorithms by a plain loop."""

from collections import Counter

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.errors import ArgumentError
from pycoll.schedule.cost.described import fabric
from pycoll.schedule.cost.fabric import Fabric, FatTree, speeds_of
from pycoll.schedule.cost.simulate import Loads, simulate

N = 24
OTHERS = "bw=1G,latency=2us,hop=300ns,gap=200ns,fold=4G"
NETWORKS = {
    "switch": f"switch:{OTHERS}",
    "fat-tree": f"fat-tree:leaf=4,over=2,{OTHERS}",
    "pods": f"fat-tree:leaf=2,pod=3,over=1.5,{OTHERS}",
    "dragonfly": f"dragonfly:group=5,over=2,{OTHERS}",
    "rails": f"rails:gpus=3,nodes=2,over=2,near_bw=8G,near_latency=500ns,{OTHERS}",
    "torus": f"torus:2x3x4,{OTHERS}",
    "ring": f"torus:24,{OTHERS}",
}
EVERY = [
    pytest.param(a, id=f"{a.collective}-{a.name}")
    for a in ALGORITHMS
    if a.worlds(N) and not a.name.endswith("_rank") and "scan" not in a.collective
]


def walk(kind, src, dst):
    """Name the links of a message, and the switches beyond the first, one step after the other."""
    if kind in ("torus", "ring"):
        return walk_torus((2, 3, 4) if kind == "torus" else (24,), src, dst)
    ends = [f"out[{src}]", f"in[{dst}]"]
    if kind in ("fat-tree", "pods"):
        leaf, pod = (4, N) if kind == "fat-tree" else (2, 6)
        hops = 0
        if src // leaf != dst // leaf:
            ends, hops = [*ends, f"up[{src // leaf}]", f"down[{dst // leaf}]"], 2
        if src // pod != dst // pod:
            ends, hops = [*ends, f"pod up[{src // pod}]", f"pod down[{dst // pod}]"], 4
        return ends, hops
    if kind == "dragonfly" and src // 5 != dst // 5:
        return [*ends, f"global[{src // 5 * 5 + dst // 5}]"], 2
    if kind == "rails":
        if src // 3 == dst // 3:
            return [f"near out[{src}]", f"near in[{dst}]"], None
        a, b = src // 6 * 3 + src % 3, dst // 6 * 3 + dst % 3
        return ends + ([f"up[{a}]", f"down[{b}]"] if a != b else []), 2 * (a != b)
    return ends, 0


def walk_torus(dims, src, dst):
    here, there = (list(np.unravel_index(r, dims)) for r in (src, dst))
    links = []
    for axis, size in enumerate(dims):
        ahead = (there[axis] - here[axis]) % size
        back = 2 * ahead > size or (2 * ahead == size and sum(here) % 2 == 1)
        for _ in range(size - ahead if back else ahead):
            others = [h for i, h in enumerate(here) if i != axis]
            rest = [d for i, d in enumerate(dims) if i != axis]
            ring = int(np.ravel_multi_index(others, rest)) if rest else 0
            place = size - 1 - here[axis] if back else here[axis]
            links.append(f"{'-' if back else '+'}{axis}[{ring * size + int(place)}]")
            here[axis] = (here[axis] + (-1 if back else 1)) % size
    return links, max(0, len(links) - 1)


def scalar(values, rank):
    return values[rank] if np.ndim(values) else values


def moves_of(folds, n):
    """List who folds how many chunks, whence, whereto, and if stores are behind a fetch."""
    moves = []
    for f in folds:
        own = []
        for owner in range(n):
            count = scalar(f.count, owner) if scalar(f.where, owner) else 0
            if count:
                srcs = [int(scalar(p.rank, owner)) % n for p in f.srcs]
                dsts = [int(scalar(p.rank, owner)) % n for p in f.dsts]
                own.append((owner, count, srcs, dsts))
        late = int(any(src != owner for owner, _, srcs, _ in own for src in srcs))
        moves += [(*move, late) for move in own]
    return moves


def reference(schedule, nbytes, kind, network, start):
    """Simulate with one message at a time; return finish times and seconds of each link."""
    n, unit = schedule.n, nbytes / schedule.chunks
    speed = {network.name(i): network.capacity[i] for i in range(network.none)}
    time, total = list(start), Counter()
    for folds in schedule.rounds(np.arange(n)):
        moves, load = (
            moves_of(folds, n),
            [Counter(), Counter()],
        )  # of stores behind a fold: the second
        sent, got = ([[0] * n, [0] * n] for _ in range(2))
        for owner, count, srcs, dsts, late in moves:
            messages = [(s, owner, 0) for s in srcs] + [(owner, t, late) for t in dsts]
            for a, b, phase in messages:
                if a != b:
                    load[phase].update(dict.fromkeys(walk(kind, a, b)[0], count * unit))
                    sent[phase][a] += 1
                    got[phase][b] += 1
        busy = [{name: each[name] / speed[name] for name in each} for each in load]
        for each in busy:
            total.update(each)

        def travel(a, b, phase, sent=sent, got=got, busy=busy):
            if a == b:
                return 0.0
            links, hops = walk(kind, a, b)
            base = network.latency + network.hop * hops if hops is not None else 5e-7
            gaps = network.gap * max(0, sent[phase][a] - 1, got[phase][b] - 1)
            return base + max(busy[phase][name] for name in links) + gaps

        after = list(time)
        for r in range(n):
            for phase in range(2):
                port = max(busy[phase].get(name, 0.0) for name in ports(network, r))
                after[r] += network.latency + port if port else 0.0
                after[r] += network.gap * max(0, sent[phase][r] - 1)
        for owner, count, srcs, dsts, late in moves:
            done = max(max(time[owner], time[s]) + travel(s, owner, 0) for s in srcs)
            done += unit / network.fold * count * (len(srcs) - 1)
            after[owner] = max(after[owner], done)
            for t in dsts:
                if t != owner:
                    after[t] = max(after[t], max(done, time[t]) + travel(owner, t, late))
        time = after
    return time, total


def ports(network, rank):
    """Name the links by which messages leave a rank."""
    if network.kind != "torus":
        return [f"out[{rank}]", f"near out[{rank}]"]
    ends = [int(np.ravel_multi_index(to, network.dims)) for to in neighbours(network.dims, rank)]
    return [walk_torus(network.dims, rank, to)[0][0] for to in ends]


def neighbours(dims, rank):
    """Next ranks both ways along each axis that is longer than two; of two, the only other one."""
    here = np.unravel_index(rank, dims)
    for axis, size in enumerate(dims):
        for step in (1, -1):
            to = list(here)
            to[axis] = (to[axis] + step) % size
            yield to


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("algorithm", EVERY)
def test_times_and_loads_equal_the_plain_loop(algorithm, kind):
    network = fabric(NETWORKS[kind], N)
    start = np.random.default_rng(3).random(N) * 1e-4
    schedule, loads = algorithm.schedule(N), Loads()
    got = simulate(schedule, 1e5, network, start=start, loads=loads)
    want, busy = reference(schedule, 1e5, kind, network, start)
    assert np.allclose(got, want, rtol=1e-12, atol=0)
    for i in range(network.none):
        assert np.isclose(np.atleast_1d(loads.busy)[i], busy[network.name(i)], atol=1e-15)


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_pair_takes_the_links_of_a_walk(kind):
    network = fabric(NETWORKS[kind], N)
    src, dst = (each.ravel() for each in np.indices((N, N)))
    src, dst = src[src != dst], dst[src != dst]
    size = np.random.default_rng(1).random(len(src))
    want = np.zeros(network.none + 1)
    for a, b, nbytes in zip(src.tolist(), dst.tolist(), size, strict=True):
        for name in walk(kind, a, b)[0]:
            want[network.number(name)] += nbytes
    got = np.zeros(network.none + 1)
    network.load(got, src, dst, size)
    assert np.allclose(got[:-1], want[:-1])
    most = [
        max(want[network.number(x)] for x in walk(kind, *ab)[0])
        for ab in zip(src, dst, strict=True)
    ]
    want[-1] = 0
    assert np.allclose(network.slowest(want, src, dst), most)


def test_uplinks_of_an_oversubscribed_leaf_are_the_bottleneck():
    exchange = find("all_to_all", "pairwise").schedule(64)
    free, narrow = (FatTree(64, leaf=8, over=over, latency=0, hop=0, gap=0) for over in (1, 4))
    times = [float(simulate(exchange, 64e6, each).max()) for each in (free, narrow)]
    assert 3 < times[1] / times[0] <= 4


def test_a_link_that_is_down_keeps_those_behind_it_waiting():
    chain = find("broadcast", "ring").schedule(16)
    network = fabric("fat-tree:leaf=4", 16, speeds_of({"down[2]": 0.0}))
    finish = simulate(chain, 1e6, network)
    assert np.isfinite(finish[:8]).all()
    assert np.isinf(finish[8:]).all()


def test_a_slow_link_slows_the_others_down():
    ring = find("all_reduce", "ring").schedule(16)
    slow = Fabric(16, speeds=speeds_of({"out[5]": 0.5}))
    plain, slowed = (simulate(ring, 1e9, each).max() for each in (Fabric(16), slow))
    assert 1.6 < slowed / plain < 2.01


@pytest.mark.parametrize("late", [(), (5,), (0, 200)])
@pytest.mark.parametrize("text", ["switch", "fat-tree:leaf=16,over=3", "rails:over=2"])
def test_many_like_rounds_take_what_each_of_them_does(text, late):
    """Noise of nothing makes every round be simulated on all ranks."""
    n = 256
    ring, start = find("all_reduce", "ring").schedule(n), np.zeros(n)
    start[list(late)] = 3e-3
    network = fabric(text, n)
    fast = simulate(ring, 1e6, network, start=start, loads=Loads())
    slow = simulate(ring, 1e6, network, start=start, noise=lambda _: np.zeros(n))
    assert np.allclose(fast, slow, rtol=1e-9)


def test_a_dead_rank_keeps_a_ring_waiting():
    start = np.zeros(64)
    start[3] = np.inf
    ring = find("all_reduce", "ring").schedule(64)
    assert np.isinf(simulate(ring, 1e6, fabric("fat-tree:leaf=8", 64), start=start)).all()


def test_too_many_messages_are_refused():
    with pytest.raises(ArgumentError, match="messages in a round"):
        simulate(find("all_gather", "direct_pull").schedule(1 << 14), 1e6, FatTree(1 << 14))


def test_too_long_is_refused():
    with pytest.raises(ArgumentError, match="takes more than 0 s to simulate"):
        simulate(find("broadcast", "ring").schedule(64), 1e6, FatTree(64), most_s=0)


def test_a_network_of_another_size_is_refused():
    with pytest.raises(ArgumentError, match=r"joins 8 ranks; .* has 9"):
        simulate(find("all_reduce", "ring").schedule(9), 1e6, FatTree(8))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("mesh", "no network 'mesh'; known: switch, fat-tree"),
        ("fat-tre", "did you mean 'fat-tree'"),
        ("fat-tree:leef=3", "did you mean 'leaf'"),
        ("fat-tree:leaf=3,leaf=4", "'leaf' twice"),
        ("fat-tree:leaf=x", "leaf: 'x' is no number"),
        ("fat-tree:over=nan", "over: 'nan' is no number"),
        ("dragonfly:over=1e400", "over: '1e400' is no number"),
        ("fat-tree:leaf=0", "leaf and over are positive"),
        ("switch:bw=0", "speeds are positive"),
        ("switch:bw=fast", "'fast' is no speed"),
        ("switch:latency=2", "'2' is no time"),
        ("torus:4x5", "torus of 4x5 does not hold 24"),
        ("torus", "does not hold 24"),
        ("dragonfly:group=-1", "group and over are positive"),
        ("rails:gpus=0", "gpus, nodes, over and near_bw are positive"),
    ],
)
def test_descriptions_that_are_wrong(text, error):
    with pytest.raises(ArgumentError, match=error):
        fabric(text, N)


def test_links_that_are_not_there():
    with pytest.raises(ArgumentError, match=r"no link 'up\[9\]'; it has out\[0..23\]"):
        fabric("fat-tree:leaf=4", N, speeds_of({"up[9]": 0.5}))
    with pytest.raises(ArgumentError, match="expected a fraction"):
        speeds_of({"up[0]": -1})


def test_speeds_are_bytes_or_bits():
    assert fabric("switch:bw=200Gb", 4).bw == 25e9
    assert fabric("switch:bw=25G,latency=1.5us", 4) == Fabric(4, bw=25e9, latency=1.5e-6)
