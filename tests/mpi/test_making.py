"""Making communicators out of others: on several threads, and where one rank cannot."""

import pytest

LIMIT = {"PYCOLL_TIMEOUT": "10"}


@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 1]])
def test_dups_beside_each_other(mpi, hosts):
    found = mpi(3, "dups_beside_each_other", hosts=hosts, timeout=100, **LIMIT)
    assert found == {"dups_beside_each_other": [[]] * 3}


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_jobs_beside_each_other(mpi, level):
    options = {"PYCOLL_TRANSPORT": "mpi", "MPI4PY_RC_THREAD_LEVEL": level, "PYCOLL_TIMEOUT": "30"}
    found = mpi(2, "jobs_beside_each_other", timeout=100, **options)
    assert found == {"jobs_beside_each_other": [[]] * 2}


@pytest.mark.parametrize("name", ["one_has_no_descriptors_left", "one_host_fails"])
def test_one_cannot(mpi, name):
    assert mpi(4, name, hosts=[0, 0, 1, 1], **LIMIT) == {name: [[]] * 4}
