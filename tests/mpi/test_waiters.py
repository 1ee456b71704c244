"""Several threads, or a signal handler, that wait for the same calls of one communicator."""

import pytest

OPTIONS = {"PYCOLL_TRANSPORT": "mpi", "PYCOLL_TIMEOUT": "20"}


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_threads_that_wait(mpi, level):
    found = mpi(2, "waiting_threads", MPI4PY_RC_THREAD_LEVEL=level, timeout=100, **OPTIONS)
    assert found == {"waiting_threads": [[]] * 2}


def test_a_signal_handler_that_asks(mpi):
    found = mpi(2, "asking_handler", MPI4PY_RC_THREAD_LEVEL="serialized", **OPTIONS)
    assert found == {"asking_handler": [[]] * 2}
