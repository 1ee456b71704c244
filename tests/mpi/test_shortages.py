"""Calls for which one rank has no memory, or no thread: every rank hears of it."""

import pytest

# What is freed, or kept for another thread, does not serve again: so memory ends where it should.
STRICT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
BY_MESSAGES = {"PYCOLL_TRANSPORT": "mpi", **STRICT}


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_no_memory(mpi, level):
    found = mpi(3, "no_memory", MPI4PY_RC_THREAD_LEVEL=level, **BY_MESSAGES)
    assert found == {"no_memory": [[]] * 3}


def test_no_memory_in_two_levels(mpi):
    found = mpi(3, "no_scratch", hosts=[0, 0, 1])
    assert found == {"no_scratch": [[]] * 3}


def test_no_thread(mpi):
    found = mpi(3, "no_thread", **BY_MESSAGES)
    assert found == {"no_thread": [[]] * 3}
