"""What ranks share: batches of calls, contests, memory in common, functions of C++."""

import ctypes
import functools
import itertools
import mmap
import os
import time

import numpy as np

from pycoll.runtime.startup.bootstrap import adopt, make_memfd

SLOTS = 4  # arrays in turn, of each contestant beside the plain loop
WARM = 4  # the first calls of a turn, one in so many, do not count


def batches(comm, call, calls, runs):
    """Return seconds a call of each run of so many calls, on the slowest rank."""
    found = np.empty(runs)
    for i in range(runs):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found[i] = (time.perf_counter() - start) / calls
    return comm.all_reduce(found, "max")


def contest(comm, ways, rounds):
    """Let contestants take turns, in another order each round, so that none follows the same one.

    Args:
        comm: The ranks.
        ways: By name, a function without arguments and how often to call it in a turn.
        rounds: Turns of each.

    Returns:
        By name the seconds of a call in each round.
    """
    found = {name: [] for name in ways}
    names, shuffle = list(ways), np.random.default_rng(0).shuffle  # the same on all ranks
    for _ in range(rounds):
        shuffle(names)
        for name in names:
            call, calls = ways[name]
            batches(comm, call, max(1, calls // WARM), 1)
            found[name].append(float(batches(comm, call, calls, 1)[0]))
    return found


def there_and_back(comm, x, y):
    """Send x from rank 0 to rank 1, which sends its own back, into y."""
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(y, 1)
    elif comm.rank == 1:
        comm.recv(y, 0)
        comm.send(x, 0)


def shared_map(comm, nbytes):
    """Return memory that all ranks map, as bytes."""
    place = np.array([os.getpid(), -1])
    if comm.rank == 0:
        place[1] = make_memfd("limit")
        os.posix_fallocate(int(place[1]), 0, nbytes)
    comm.broadcast(place)
    fd = int(place[1]) if comm.rank == 0 else adopt(*place.tolist())
    comm.barrier()
    found = mmap.mmap(fd, nbytes)
    os.close(fd)
    return np.frombuffer(found, np.uint8)


class ByHand:
    """Functions of a library of ``native/`` on memory that all ranks map.

    Each takes a `Ranks` of native/by_hand.h, then numbers.

    Args:
        comm: The ranks.
        library: Path of the library.
        nbytes: Bytes of the memory, behind its header.
    """

    class Ranks(ctypes.Structure):
        """The ranks as native/by_hand.h has them."""

        _fields_ = [
            ("memory", ctypes.c_void_p),
            *[(name, ctypes.c_size_t) for name in ("rank", "ranks")],
            ("turn", ctypes.POINTER(ctypes.c_uint64)),
        ]

    HEADER = 4096  # kHeader of native/by_hand.h

    def __init__(self, comm, library, nbytes):
        self._library = ctypes.CDLL(library)
        self._memory = shared_map(comm, self.HEADER + nbytes)
        turn = ctypes.pointer(ctypes.c_uint64(0))
        self._ranks = self.Ranks(self._memory.ctypes.data, comm.rank, comm.world_size, turn)

    def function(self, name, *numbers):
        """Return a function of no argument."""
        passed = map(ctypes.c_size_t, numbers)
        call = functools.partial(getattr(self._library, name), self._ranks, *passed)
        call.kept = self  # memory lives as long as what works on it
        return call


def contestants(comm, library, nbytes, calls):
    """Return an all-reduce in place beside the plain C++ loop of native/limit_all_reduce.cpp.

    They are "plain", "symmetric" and "ordinary" for `contest`, on two ranks. A call of "plain" is
    as many as a turn of the others has.
    """
    count = nbytes // 4
    stride = nbytes + 320  # as in the memory of pycoll
    plain = ByHand(comm, library, 2 * SLOTS * stride)

    def pycoll(rows):
        turn = itertools.cycle(row[:count] for row in rows)
        return lambda: comm.all_reduce(x := next(turn), out=x)

    ways = {"plain": (plain.function("limit_all_reduce", count, stride, SLOTS, calls), 1)}
    for name, make in (("symmetric", comm.zeros), ("ordinary", np.zeros)):
        call = pycoll(make((SLOTS, count + 80), np.float32))
        for _ in range(2 * SLOTS):
            call()
        ways[name] = (call, calls)
    return ways
