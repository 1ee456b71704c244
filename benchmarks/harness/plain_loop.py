"""An all-reduce in place beside the plain C++ loop of native/limit_all_reduce.cpp, on two ranks."""

import itertools

import numpy as np

from harness.ranks import ByHand

SLOTS = 4  # arrays in turn, of each contestant


def contestants(comm, library, nbytes, calls):
    """Return "plain", "symmetric" and "ordinary" for `harness.ranks.contest`.

    A call of "plain" is as many as a turn of the others has.
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
