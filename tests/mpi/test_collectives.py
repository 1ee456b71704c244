"""Everything a communicator does, over MPI: against NumPy, at several world sizes."""

import pytest

from samples import sample

MESSAGES = {"PYCOLL_TRANSPORT": "mpi", "PYCOLL_TIMEOUT": "30"}
CHECKS = ["collectives", "roots", "types", "variants", "algorithms"]  # one job does many
SEGMENTS = ["segments", "segments_of_all"]
SIZES = sample([2, 3, 5], [2, 5])


@pytest.mark.parametrize("checks", [CHECKS, ["orders"], SEGMENTS], ids=",".join)
@pytest.mark.parametrize("n", SIZES)
def test_results(mpi, n, checks):
    found = mpi(n, "transport", *checks, timeout=110, **MESSAGES)
    assert found == {"transport": ["MpiSession"] * n, **{check: [[]] * n for check in checks}}


@pytest.mark.parametrize("n", SIZES)
def test_calls_of_other_kinds(mpi, n):
    found = mpi(n, "messages", "background", "groups", "plans", **MESSAGES)
    assert found == {
        "messages": [n] * n,
        "background": [[True] * 2] * n,
        "groups": [[True] * 3] * n,
        "plans": [["", ""]] * n,
    }
