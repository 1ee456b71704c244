"""The health check over MPI: by messages, and in two levels."""

import pytest


@pytest.mark.parametrize("hosts", [[0, 0, 0, 1], [0, 1], None])
def test_check(mpi, hosts):
    n = len(hosts or [0, 1, 2])
    settings = {} if hosts else {"PYCOLL_TRANSPORT": "mpi"}
    found = mpi(n, "check", "hosts_of", hosts=hosts, PYCOLL_TIMEOUT="20", **settings)
    assert found == {"check": [[]] * n, "hosts_of": [hosts or [0, 1, 2]] * n}
