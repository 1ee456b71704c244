"""A reduction of one's own: the mean and variance of all numbers, merged pair by pair."""

import numpy as np

import pycoll


def merge(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Merge (count, mean, sum of squared deviations) of two sets: associative, not commutative."""
    count = a[0] + b[0]
    delta = b[1] - a[1]
    mean = a[1] + delta * b[0] / count
    return np.array([count, mean, a[2] + b[2] + delta**2 * a[0] * b[0] / count])


with pycoll.init() as comm:
    numbers = np.random.default_rng(comm.rank).normal(5.0, 2.0, 100 + comm.rank)
    mine = np.array([numbers.size, numbers.mean(), numbers.var() * numbers.size])
    total = comm.all_reduce(mine, merge)
    if comm.rank == 0:
        print(f"{total[0]:.0f} numbers, mean {total[1]:.9f}, variance {total[2] / total[0]:.9f}")
