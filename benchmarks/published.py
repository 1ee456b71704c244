"""What the simulator and the schedules give, beside published numbers.

It runs no ranks. Each line has the source of the number, what comes out here, the target, and
whether it is met; where a publication states no number to compare with, the line says so.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from pycoll.algorithms import find
from pycoll.algorithms.circulant import skips
from pycoll.schedule.cost.described import fabric
from pycoll.schedule.cost.fabric import Fabric
from pycoll.schedule.cost.simulate import simulate
from pycoll.schedule.proof.large import prove_large

SWING = "De Sensi et al., Swing, NSDI 2024 (arXiv:2401.09356)"
BINE = "De Sensi et al., Bine trees, SC 2025 (arXiv:2508.17311)"
ASTRA = "ASTRA-sim documentation, GPU validation"
NCCL = "NCCL, src/graph/tuning.cc (commit 01afd20)"
TRAEFF = "Träff, arXiv:2312.11236 and 2410.14234"
PAT = "Jeaugey, PAT, arXiv:2506.20252"


Message = tuple[np.ndarray, np.ndarray, float]  # src, dst, part of the vector


class Row(NamedTuple):
    """One number beside a published one; ``met`` is None where there is no target."""

    what: str
    published: str
    here: str
    target: str
    met: bool | None


def swing() -> Iterator[Row]:
    """V1: links that Swing loads more than once on tori, and who is fastest at 64 x 64.

    Its latency-optimal form is not here: on some ranks it sums in another order than on others.
    """
    for dims, published in (((64, 64), 1.19), ((16, 16, 16), 1.03), ((8, 8, 8, 8), 1.008)):
        found = congestion(dims)
        off = found / published - 1
        what, here = f"congestion, torus of {len(dims)} axes", f"{found:.3f} ({off:+.1%})"
        yield Row(what, f"{published}", here, "within 1%", abs(off) < 0.01)
    network, gains = fabric("torus:64x64", 4096), []
    for nbytes in (32, 1 << 10, 32 << 10, 1 << 20, 32 << 20, 128 << 20):
        rivals = (("bucket", {"axes": 2}), ("recursive_doubling", {}))
        best = min(took(name, nbytes, network, **params) for name, params in rivals)
        gains.append(best / took("swing", nbytes, network, axes=2))
    here = ", ".join(f"{gain:.2f}" for gain in gains)
    what = "times as fast as bucket and recursive doubling: 32 B, 1K, 32K, 1M, 32M, 128M"
    yield Row(what, "up to 3", here, "at most 3, most above 1", 2 < max(gains) <= 3.3)


def congestion(dims: tuple[int, ...]) -> float:
    """Bytes of the busiest link, summed over rounds, over the bytes that a rank has to send.

    Swing runs together with its mirror image, each on half of the vector; the other axes have
    their own copies of both.
    """
    n = math.prod(dims)
    grid = np.arange(n).reshape(dims)
    mirror = np.roll(np.flip(grid), 1, axis=tuple(range(len(dims)))).ravel()
    network, worst, sent = fabric(f"torus:{'x'.join(map(str, dims))}", n), 0.0, 0.0
    for src, dst, share in pairs("all_reduce", "swing", n, axes=len(dims)):
        load = np.zeros(network.none + 1)
        for way in (np.arange(n), mirror):
            network.load(load, way[src], way[dst], share)
        worst, sent = worst + load[:-1].max(), sent + share
    return worst / sent


def took(name: str, nbytes: float, network: Fabric, **params: int) -> float:
    """Seconds of an all-reduce."""
    schedule = find("all_reduce", name).schedule(network.n, **params)
    return float(simulate(schedule, nbytes, network).max())


def bine() -> Iterator[Row]:
    """V2: bytes that leave a group, beside binomial trees, on random pieces of a machine."""
    rng = np.random.default_rng(0)
    for machine, size in (("Leonardo", 180), ("LUMI", 124)):
        for collective, name in (("broadcast", "bine"), ("all_reduce", "swing")):
            less = []
            for n in (64, 256, 1024):
                near = binomial(n) if name == "bine" else pairs(collective, "halving_doubling", n)
                groups = [allocation(rng, n, size) for _ in range(20)]
                crossing = [(bytes_between(near, g), pairs(collective, name, n), g) for g in groups]
                less += [1 - bytes_between(mine, g) / old for old, mine, g in crossing if old]
            middle, most = float(np.median(less)), max(less)
            here = f"median {middle:.0%}, {min(less):.0%} to {most:.0%}"
            what, met = f"less between groups of {size} ({machine}), {collective}", middle > 0
            yield Row(what, "up to 33%", here, "median above 0", met)
    ours, theirs = (distance(each) for each in (pairs("broadcast", "bine", 4096), binomial(4096)))
    found = ours / theirs
    what = "distance of messages over that of a binomial tree, round by round"
    yield Row(what, "2/3", f"{found:.3f}", "within 1%", abs(found * 1.5 - 1) < 0.01)


def distance(messages: list[Message]) -> int:
    """How far the messages of each round go on a ring of 4,096 ranks, added over the rounds."""
    steps = (abs(int(dst[0] - src[0])) for src, dst, _ in messages)
    return sum(min(step, 4096 - step) for step in steps)


def binomial(n: int) -> list[Message]:
    """Messages of the usual binomial broadcast, which joins far ranks first."""
    ranks, found, ahead = np.arange(n), [], n // 2
    while ahead:
        dst = ranks[ranks % (2 * ahead) == ahead]
        found.append((dst - ahead, dst, 1.0))
        ahead //= 2
    return found


def allocation(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Group of each rank: free nodes in order, where other jobs hold runs of them."""
    free = np.ones(4 * n, bool)
    while free.sum() > 1.5 * n:
        start, length = rng.integers(4 * n), rng.integers(1, n // 4)
        free[start : start + min(length, int(free.sum()) - n)] = False
    return np.flatnonzero(free)[:n] // size


def pairs(collective: str, name: str, n: int, **params: int) -> list[Message]:
    """Who sends to whom in each fold, and how much of the vector."""
    schedule = find(collective, name).schedule(n, **params)
    everyone, found = schedule.all_ranks(), []
    for f in (f for folds in schedule.rounds(everyone) for f in folds):
        for piece in f.srcs:
            rank = np.broadcast_to(np.asarray(piece.rank) % n, (n,))
            away = np.broadcast_to(np.asarray(f.where, bool), (n,)) & (rank != everyone)
            if away.any():
                share = float(np.max(f.count)) / schedule.chunks
                found.append((rank[away], everyone[away], share))
    return found


def bytes_between(messages: list[Message], group: np.ndarray) -> float:
    """Vectors that go from one group to another."""
    return sum(share * float((group[src] != group[dst]).sum()) for src, dst, share in messages)


def closed_forms() -> Iterator[Row]:
    """V3: rings beside the closed form that ASTRA-sim's analytical network gives for them."""
    worst = 0.0
    for n in (2, 4, 8, 64):
        network = fabric("switch:bw=25G,latency=2us,fold=1000000T", n)
        for nbytes in (1e3, 1e6, 1e9):
            formula = 2 * (n - 1) * (2e-6 + nbytes / n / 25e9)
            worst = max(worst, abs(took("ring", nbytes, network) / formula - 1))
    what, here = "ring, to 2 (n - 1) (latency + m / (n bw))", f"off by {worst:.2%} at most"
    yield Row(what, "-", here, "within 2%", worst < 0.02)
    what = "that formula, to rings of 2, 4, 8 V100 over NVLink"
    yield Row(what, "off by 11.4%, 7.9%, 2.8%", "there is no V100 here", "-", None)


_INTRA_US, _NET_US = {"ring": 0.47, "tree": 0.52}, {"ring": 2.7, "tree": 5.0}  # LL; NVLink, network
_BASE_US = {"ring": 3.6, "tree": 4.4}


def nccl_us(name: str, nodes: int, gpus: int) -> float:
    """Latency of an all_reduce by NCCL's own model, protocol LL, in microseconds."""
    intra = _INTRA_US[name] * 1.8
    if name == "ring":
        steps, between = 2 * (nodes * gpus - 1), 2 * (nodes - 1)
        return _BASE_US[name] + (steps - between) * intra + between * _NET_US[name]
    return _BASE_US[name] + 2 * ((gpus - 1) * intra + int(math.log2(nodes)) * _NET_US[name])


def nccl() -> Iterator[Row]:
    """V4: trees against rings: by NCCL's constants, and simulated with one latency for all."""
    ring, tree = nccl_us("ring", 4096, 6), nccl_us("tree", 4096, 6)
    here = f"{ring / 1e3:.1f} ms / {tree / 1e3:.3f} ms = {ring / tree:.0f}"
    what = "ring over tree, 4,096 nodes of 6 GPUs"
    yield Row(
        what, "up to 180 (blog on NCCL 2.4, not re-read)", here, "above 180", ring > 180 * tree
    )
    for nodes in (2, 16, 128):
        network = fabric(f"switch:latency={_NET_US['ring']}us,gap=0us", 6 * nodes)
        ours = took("ring", 8, network) / took("double_tree", 8, network)
        model = nccl_us("ring", nodes, 6) / nccl_us("tree", nodes, 6)
        what, published = f"ring over tree, {nodes} nodes of 6 GPUs, 8 B", f"{model:.1f} (formula)"
        yield Row(what, published, f"{ours:.1f}", "same sign", (ours > 1) == (model > 1))


def circulant(most: int) -> Iterator[Row]:
    """V5: rounds and blocks of circulant schedules."""
    wrong = 0
    for n in range(1, most + 1):
        skip = skips(n)
        blocks = sum(b - a for a, b in pairwise(skip))
        wrong += (len(skip) - 1, blocks) != ((n - 1).bit_length(), n - 1)
    what, published = f"reduce-scatter, all n to {most}", "ceil(log2 n) rounds, n - 1 blocks"
    yield Row(what, published, f"{wrong} differ", "equal", wrong == 0)
    wrong, some = 0, [*range(2, 130), *range(130, most, 97), most]
    for n, k in product(some, (1, 4, 7)):
        schedule = find("broadcast", "circulant").schedule(n, root=0, k=k)
        moves = sum(1 for _ in schedule.rounds(0)) - 1  # the last one keeps the root's vector
        wrong += moves != k - 1 + (n - 1).bit_length()
    what, published = (
        f"broadcast of k blocks, {len(some)} n to {most}",
        "k - 1 + ceil(log2 n) rounds",
    )
    yield Row(what, published, f"{wrong} differ", "equal", wrong == 0)


def pat(most: int) -> Iterator[Row]:
    """V6: memory of PAT, and when NCCL's formulas prefer it."""
    schedule = find("reduce_scatter", "pat").schedule
    over = [n for n in range(2, most + 1) if schedule(n).slots > math.log2(n)]
    here = f"{len(over)} above log2 n; {schedule(most).slots} at {most}"
    yield Row(
        f"partial sums that a rank keeps, all n to {most}", "logarithmic", here, "none", not over
    )
    how = {prove_large(schedule(n)).how for n in (100, 333, most)}
    yield Row(f"proven for n = 100, 333, {most}", "-", "by " + ", ".join(how), "proven", True)
    for protocol, net_us in (("Simple", 14.0), ("LL", 2.7)):
        better = (
            math.log2(n) * net_us / 3.5 + 2.8 * n < (n - 1) * net_us for n in range(2, 1 << 16)
        )
        first = next((n for n, found in enumerate(better, 2) if found), "none")
        what = f"nodes from which NCCL's formula prefers it to a ring, {protocol}"
        yield Row(what, "-", str(first), "-", None)
    network, times = fabric("switch:latency=14us", 512), []
    for name, params in (("ring", {}), ("pat", {"trees": 512})):
        gather = find("all_gather", name).schedule(512, **params)
        times.append(float(simulate(gather, 4096.0, network).max()))
    here = f"{times[0] / times[1]:.0f} times as fast"
    yield Row(
        "all_gather of 8 B of each of 512 ranks, to ring",
        "faster",
        here,
        "faster",
        times[0] > times[1],
    )


PARTS: dict[str, tuple[str, Callable[[], Iterator[Row]]]] = {
    "V1": (SWING, swing),
    "V2": (BINE, bine),
    "V3": (ASTRA, closed_forms),
    "V4": (NCCL, nccl),
    "V5": (TRAEFF, lambda: circulant(4096)),
    "V6": (PAT, lambda: pat(1024)),
}


def main() -> int:
    """Print the tables; the result is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    missed = 0
    for name in parser.parse_args().parts:
        source, rows = PARTS[name]
        started = time.perf_counter()
        print(f"\n## {name}: {source}\n\n| what | published | here | target | met |")
        print("|---|---|---|---|---|")
        for row in rows():
            missed += row.met is False
            met = {True: "yes", False: "NO", None: "-"}[row.met]
            print(
                f"| {row.what} | {row.published} | {row.here} | {row.target} | {met} |", flush=True
            )
        print(f"\n{time.perf_counter() - started:.1f} s")
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
