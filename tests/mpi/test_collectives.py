"""Everything a communicator does, over MPI: against NumPy, at several world sizes."""

import pytest

MESSAGES = {"PYCOLL_TRANSPORT": "mpi", "PYCOLL_TIMEOUT": "30"}
CHECKS = ["collectives", "roots", "types", "orders", "segments", "variants", "algorithms"]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_results(mpi, n, check):
    found = mpi(n, "transport", check, timeout=110, **MESSAGES)
    assert found == {"transport": ["MpiSession"] * n, check: [[]] * n}


@pytest.mark.parametrize("n", [2, 3, 5])
def test_calls_of_other_kinds(mpi, n):
    found = mpi(n, "messages", "background", "groups", "plans", **MESSAGES)
    assert found == {
        "messages": [n] * n,
        "background": [[True] * 2] * n,
        "groups": [[True] * 3] * n,
        "plans": [["", ""]] * n,
    }
