"""The health check over MPI: by messages, and in two levels."""

import pytest


@pytest.mark.parametrize(
    ("n", "hosts", "variables"),
    [
        (3, [0, 1, 2], {"PYCOLL_TRANSPORT": "mpi"}),
        (4, [0, 0, 0, 1], {"PYCOLL_PRETEND_HOSTS": "3,1"}),
        (2, [0, 1], {"PYCOLL_PRETEND_HOSTS": "1,1"}),
    ],
)
def test_check(mpi, n, hosts, variables):
    found = mpi(n, "check", "hosts_of", PYCOLL_TIMEOUT="20", **variables)
    assert found == {"check": [[]] * n, "hosts_of": [hosts] * n}
