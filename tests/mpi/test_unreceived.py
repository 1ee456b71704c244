"""What has been sent and waits for its receiver delays nobody's calls."""

import pytest

NAMES = ["refused_then_large", "received_late", "refused_behind_mail"]
LIMIT = {"PYCOLL_TIMEOUT": "10"}


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_by_messages(mpi, level):
    options = {"PYCOLL_TRANSPORT": "mpi", "MPI4PY_RC_THREAD_LEVEL": level, **LIMIT}
    assert mpi(3, *NAMES, **options) == {name: [[]] * 3 for name in NAMES}


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 1, 0]])
def test_in_two_levels(mpi, hosts):
    found = mpi(len(hosts), *NAMES, hosts=hosts, **LIMIT)
    assert found == {name: [[]] * len(hosts) for name in NAMES}
