"""Failing well over MPI: every rank gets an error that says who, what and where, and soon."""

import pytest

MESSAGES = {"PYCOLL_TRANSPORT": "mpi", "PYCOLL_TIMEOUT": "20"}
FAILURES = [
    "mismatches",
    "same_numbers",
    "refusals",
    "timeouts",
    "absences",
    "leaving",
    "long_reasons",
    "interrupts",
    "misuse",
    "last_messages",
]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_failures(mpi, n):
    found = mpi(n, *FAILURES, timeout=110, **MESSAGES)
    assert found == {name: [[]] * n for name in FAILURES}
