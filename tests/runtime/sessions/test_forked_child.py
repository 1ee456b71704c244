"""A child made by fork has no part in its parent's communicator over messages."""

import os

import numpy as np
import pytest

import chaos
from pycoll.config import Config
from pycoll.errors import ForkedError
from pycoll.testing import run_processes


class Interrupts:
    """An array that is interrupted as it is looked at."""

    @property
    def __array_interface__(self):
        raise KeyboardInterrupt


def refused(comm):
    try:
        comm.all_reduce(np.ones(3))
    except ForkedError:
        return True
    return False


def interrupted(comm):
    try:
        comm.all_reduce(Interrupts())
    except KeyboardInterrupt:
        return True
    except ForkedError:
        return True
    return False


def in_child(fn, *args):
    """Return whether a function is true in a child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if fn(*args) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("child", [refused, interrupted])
@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 1]])
def test_a_child_that_calls_does_no_harm(hosts, child):
    def part(comm):
        with chaos.over_tcp(comm, hosts, Config(10.0)) as connected:
            first = connected.all_reduce(np.ones(3))
            found = connected.rank != 0 or in_child(child, connected)
            second = connected.all_reduce(np.ones(3))
            return found and np.array_equal(first, second)

    assert run_processes(3, part, timeout=60) == [True] * 3
