"""Measuring the constants of the cost model on the ranks of a communicator.

Every number is the least of several repetitions, which other work on the machine can only raise;
slopes are medians over pairs of sizes (Theil and Sen), which one odd point does not bend.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycoll.algorithms import find
from pycoll.comm import Communicator
from pycoll.schedule.cost.cost import Machine
from pycoll.schedule.cost.network import Network

_COPIES = tuple(256 << 10 << i for i in range(4))
_MESSAGES = (8, 4 << 10, 64 << 10, 256 << 10)
_REPEATS = 5
_SLICE_S = 0.004
_BURST = 32
LEAST = 1e-13  # no constant is nothing
_MOST_HOSTS = 8


def machine_of(comm: Communicator) -> Machine | Network:
    """Measure; a collective of two ranks or more, who all get the same numbers."""
    transport, ranks_per_host = comm._session.place
    shared = transport in ("shared memory", "threads")
    return _shared(comm) if shared else _network(comm, ranks_per_host)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope between all pairs of points, at least almost nothing."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2)]
    return max(LEAST, statistics.median(slopes))


def _least(function: Callable[[], Any]) -> float:
    """Return seconds a call of a function that needs no other rank."""
    start = time.perf_counter()
    function()
    count = int(min(max(_SLICE_S / max(time.perf_counter() - start, 1e-9), 1), 2000))
    return _repeated(function, count)


def _repeated(function: Callable[[], Any], count: int) -> float:
    found = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(count):
            function()
        found.append((time.perf_counter() - start) / count)
    return min(found)


def _from(comm: Communicator, rank: int, values: Sequence[float]) -> list[float]:
    """Return the values of one rank on all ranks."""
    return comm.broadcast(np.array(values, float), rank).tolist()


def _slowest(comm: Communicator, value: float) -> float:
    return float(comm.all_reduce(np.array([value]), "max")[0])


def _copies(alone: Communicator) -> float:
    """Return seconds a byte of the copies that a world of one rank makes."""

    def copy(nbytes: int) -> Callable[[], Any]:
        x, y = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        return lambda: alone.broadcast(x, out=y)

    return slope([(nbytes, _least(copy(nbytes))) for nbytes in _COPIES])


def _shared(comm: Communicator) -> Machine:
    n, me, usual = comm.world_size, comm.rank, Machine()
    with comm.split(me) as alone:
        x = np.ones(2, np.float32)
        idle = _least(lambda: alone.all_reduce(x, out=x)), _least(alone.barrier)
        call, empty = _from(comm, 0, idle)
        (beta,) = _from(comm, 0, [_copies(alone) / 2 if me == 0 else 0.0])
        comm.barrier()
        bus = _slowest(comm, _copies(alone) / 2) / n
    gamma = _gamma(comm, beta)
    alpha, sigma = _synchronisation(comm, empty)
    cell = comm._session.config.cell_bytes
    ratio = usual.sigma / usual.alpha
    if n == 2:  # with one peer to wait for the two cannot be separated
        alpha, sigma = (alpha + sigma) / (1 + ratio), (alpha + sigma) * ratio / (1 + ratio)
    return Machine(alpha, sigma, beta, gamma, min(bus, beta), call, cell)


def _gamma(comm: Communicator, beta: float) -> float:
    """Time a fold of two sources in symmetric memory, and take off its loads and stores."""
    pair = comm.split(0 if comm.rank < 2 else None)
    points = [(0.0, 0.0), (1.0, 0.0)]
    if pair is not None:
        points = []
        with pair:
            for nbytes in _COPIES:
                x = pair.empty(nbytes // 4, np.float32)
                y = pair.empty(nbytes // 8, np.float32)
                x[:], y[:] = 1, 1
                call = lambda x=x, y=y: pair.reduce_scatter(x, out=y)  # noqa: E731
                call()
                points.append((nbytes / 2, _repeated(call, 20)))
    (found,) = _from(comm, 0, [slope(points)])
    return max(LEAST, found - 3 * beta)


def _synchronisation(comm: Communicator, empty: float) -> tuple[float, float]:
    """Time barriers of 2, 3, ... ranks; return alpha and sigma; `empty` is one of one rank."""
    sizes = sorted({2, min(3, comm.world_size), comm.world_size})
    times = []
    for k in sizes:
        group = comm.split(0 if comm.rank < k else None)
        spent = 0.0
        if group is not None:
            with group:
                group.barrier()
                spent = _repeated(group.barrier, 50)
        times.append(_from(comm, 0, [spent])[0])
    one = Machine(alpha=1.0, sigma=0.0, beta=0.0, gamma=0.0, bus=0.0, call=0.0)
    waits = one.predict(find("all_reduce", "one_shot").schedule(2), 0, False)
    each = [max(LEAST, (t - empty) / waits) for t in times]
    if len(sizes) == 1:
        return each[0], 0.0
    peers = [(float(k - 1), seconds) for k, seconds in zip(sizes, each, strict=True)]
    sigma = slope(peers)
    if sigma < each[0]:
        return each[0] - sigma, sigma
    return LEAST, each[-1] / (sizes[-1] - 1)  # more ranks than cores: all is waiting for a turn


def _network(comm: Communicator, ranks_per_host: tuple[int, ...]) -> Network:
    hosts = list(comm._session.hosts)
    leaders = [hosts.index(host) for host in sorted(set(hosts))]
    far = [_link(comm, leaders[0], other) for other in leaders[1 : _MOST_HOSTS + 1]]
    mates = next(
        ((a, b) for a, b in itertools.combinations(range(len(hosts)), 2) if hosts[a] == hosts[b]),
        None,
    )
    far_beta, sigma = (max(values) for values in zip(*far, strict=True))
    with comm.split(comm.rank) as alone:
        x = np.ones(2, np.float32)
        call = _slowest(comm, _least(lambda: alone.all_reduce(x, out=x)))
    far_alpha, sigma = _rounds(comm, leaders, call, sigma)
    alpha, beta = far_alpha, far_beta
    if mates:
        beta, gap = _link(comm, *mates)
        alpha = _rounds(comm, mates, call, gap)[0]
    in_order = hosts == sorted(hosts)
    ranks = ranks_per_host if in_order else ()
    return Network(alpha, beta, far_alpha, far_beta, sigma, _fold(comm), call, ranks)


def _rounds(
    comm: Communicator, ranks: Sequence[int], call: float, gap: float
) -> tuple[float, float]:
    """Time rounds of small messages among some ranks; return alpha, and the gap between messages.

    A barrier has log n rounds in which each rank sends a message and waits for one; in one round of
    an all-gather each sends one to all others. With two ranks that says nothing of the gap.
    """
    k, spent = len(ranks), [0.0, 0.0]
    group = comm.split(0 if comm.rank in ranks else None)
    if group is not None:
        with group:
            x, y = np.ones(1, np.float32), np.ones(k, np.float32)
            all_at_once = lambda: group.all_gather(x, out=y, algorithm="direct_push")  # noqa: E731
            for i, function in enumerate((group.barrier, all_at_once)):
                function()
                group.barrier()
                spent[i] = _repeated(function, 50)
    barrier, gather = (max(LEAST, t - call) for t in _from(comm, ranks[0], spent))
    alpha = barrier / (k - 1).bit_length()
    return alpha, max(LEAST, (gather - alpha) / (k - 2)) if k > 2 else gap


def _fold(comm: Communicator) -> float:
    """Time NumPy's addition in the cache, which does what a fold does there."""

    def add(nbytes: int) -> Callable[[], Any]:
        x, y = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
        return lambda: np.add(x, y, out=y)

    return _from(comm, 0, [slope([(nbytes, _least(add(nbytes))) for nbytes in _COPIES])])[0]


def _link(comm: Communicator, a: int, b: int) -> tuple[float, float]:
    """Bounce messages between two ranks; return beta and the gap between messages."""
    beta = gap = 0.0
    comm.barrier()
    if comm.rank in (a, b):
        peer, first = (b, True) if comm.rank == a else (a, False)
        points = [(n, _exchange(comm, n, peer, first, 1) / 2) for n in _MESSAGES]
        beta = slope(points)
        burst = _exchange(comm, 8, peer, first, _BURST)
        gap = max(LEAST, (burst - 2 * points[0][1]) / (_BURST - 1))
    comm.barrier()
    beta, gap = _from(comm, a, [beta, gap])
    return beta, gap


def _exchange(comm: Communicator, nbytes: int, peer: int, first: bool, burst: int) -> float:
    """Return the time of the fastest burst of messages with its answer."""
    x, found = np.zeros(nbytes, np.uint8), []
    for _ in range(2 * _REPEATS):
        start = time.perf_counter()
        for _ in range(burst if first else 0):
            comm.send(x, peer)
        for _ in range(1 if first else burst):
            comm.recv(x, peer)
        if not first:
            comm.send(x, peer)
        found.append(time.perf_counter() - start)
    return min(found[1:])
