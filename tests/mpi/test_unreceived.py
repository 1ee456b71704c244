"""What has been sent and waits for its receiver delays nobody's calls."""

import pytest

import mpirun

NAMES = ["refused_then_large", "received_late", "refused_behind_mail"]
LIMIT = {"PYCOLL_TIMEOUT": "10"}


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_by_messages(mpi, level):
    options = {"PYCOLL_TRANSPORT": "mpi", "MPI4PY_RC_THREAD_LEVEL": level, **LIMIT}
    assert mpi(3, *NAMES, **options) == {name: [[]] * 3 for name in NAMES}


@pytest.mark.parametrize("n", [2, 3])
def test_what_was_given_up_is_not_received(mpi, n):
    options = {"PYCOLL_TRANSPORT": "mpi", **LIMIT}
    assert mpi(n, "given_up_and_changed", **options) == {"given_up_and_changed": [[]] * n}


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 1, 0]])
def test_in_two_levels(mpi, hosts):
    found = mpi(len(hosts), *NAMES, hosts=hosts, **LIMIT)
    assert found == {name: [[]] * len(hosts) for name in NAMES}


@pytest.mark.parametrize("count", [100, 10_000, 1 << 20])
def test_a_program_that_ends_without_waiting(mpi, count):
    process = mpirun.launch(2, mpirun.PROGRAMS.with_name("sent_last.py"), [str(count)])
    output = mpirun.finish(process, 60)
    assert process.returncode == 0, output
