"""Ranks cut a call into the same messages, though each has a plan of its own."""

import numpy as np
import pytest

import chaos
from pycoll.config import Config
from pycoll.testing import run_processes

KIB = 1024


def over_tcp(n, body):
    """Run a function on ranks that are each on a host of its own; return what it returns."""

    def part(comm):
        with chaos.over_tcp(comm, list(range(n)), Config(20.0)) as connected:
            return body(connected)

    return run_processes(n, part, timeout=90)


@pytest.mark.parametrize(("n", "algorithm"), [(7, "binomial"), (17, None)])
def test_messages_of_inner_ranks_are_longer_than_those_of_leaves(n, algorithm):
    """A binomial tree hands on blocks of many ranks at once: some fit a packet, others do not."""

    def body(comm):
        wrong = []
        for nbytes in (8, 1 * KIB, 3 * KIB, 5 * KIB, 9 * KIB, 20 * KIB, 33 * KIB, 70 * KIB):
            x = np.arange(nbytes // 8) + 1000.0 * comm.rank
            whole = np.concatenate([np.arange(nbytes // 8) + 1000.0 * r for r in range(n)])
            for root in (0, n - 1):
                got = comm.gather(x, root=root, algorithm=algorithm)
                if comm.rank == root and not np.array_equal(got, whole):
                    wrong.append(("gather", nbytes, root))
                got = comm.scatter(whole, root=root, algorithm=algorithm)
                if not np.array_equal(got, x):
                    wrong.append(("scatter", nbytes, root))
        return wrong

    assert over_tcp(n, body) == [[]] * n
