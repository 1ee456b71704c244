"""A reduction of one's own: the mean and variance of all numbers, merged pair by pair."""

import numpy as np
from mpi4py import MPI


def merge(a, b):
    """Merge (count, mean, sum of squared deviations) of two sets: associative, not commutative."""
    count = a[0] + b[0]
    delta = b[1] - a[1]
    mean = a[1] + delta * b[0] / count
    return np.array([count, mean, a[2] + b[2] + delta**2 * a[0] * b[0] / count])


def merge_buffers(a, b, datatype):
    """Call merge on the memory that MPI hands over, and store the result in b."""
    b = np.frombuffer(b)
    b[:] = merge(np.frombuffer(a), b)


comm = MPI.COMM_WORLD
numbers = np.random.default_rng(comm.rank).normal(5.0, 2.0, 100 + comm.rank)
mine = np.array([numbers.size, numbers.mean(), numbers.var() * numbers.size])
op = MPI.Op.Create(merge_buffers, commute=False)
total = np.empty(3)
comm.Allreduce(mine, total, op=op)
op.Free()
if comm.rank == 0:
    print(f"{total[0]:.0f} numbers, mean {total[1]:.9f}, variance {total[2] / total[0]:.9f}")
