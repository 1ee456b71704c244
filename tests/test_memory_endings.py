"""Registered arrays whose process forks: whose pages they are then."""

import os

import numpy as np
import pytest

from pycoll.config import Config
from pycoll.testing import run_processes

SMALL = Config(timeout_s=10, heap_bytes=16 << 20)
NBYTES = 60_000  # so few that the pages go back to malloc, not to the system


def in_child(function):
    """Return the exit code of a forked child that runs a function."""
    child = os.fork()
    if child == 0:
        os._exit(function() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("how", ["collected", "unregistered"])
def test_what_a_forked_child_frees_is_its_own(how):
    def rank(comm):
        arrays = [np.full(NBYTES, 7, np.uint8) for _ in range(3)]
        any(map(comm.register, arrays))

        def child():
            if how == "unregistered":
                any(map(comm.unregister, arrays))
                assert all((x == 7).all() for x in arrays)
            arrays.clear()
            later = [np.full(NBYTES, 99, np.uint8) for _ in range(40)]
            return int(later[0][0])

        return in_child(child), all((x == 7).all() for x in arrays)

    assert run_processes(1, rank, config=SMALL) == [(99, True)]
