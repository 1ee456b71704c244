"""Large results are stored in one of two ways, by the time that each takes: always the same bytes.

Of equal calls the first seven store in the ordinary way, and where there is a choice the next four
past the caches; tests/native/engine/test_engine.cpp makes sure of that.
"""

import pytest

from cases import IN_PLACE, MOVING, PRIVATE, REDUCING, SYMMETRIC, make, run_cases
from pycoll.testing import run_processes, run_threads

EQUAL_CALLS = 11
LARGE = 17_000  # elements of one rank's share; every case has a count, so a choice, of its own


def repeated(comm, cases):
    """Run each case often enough for both ways; return what is wrong."""
    return [wrong for case in cases for wrong in run_cases(comm, [case] * EQUAL_CALLS)]


def of_every_kind(collective, n):
    """Return cases of all kinds of memory, some types, and averages."""
    memories = [m for m in PRIVATE + SYMMETRIC if collective in IN_PLACE or "in_place" not in m]
    kinds = [("float32", memory, {}) for memory in memories]
    for memory in ("out", "symmetric", "symmetric_misaligned"):
        kinds += [(name, memory, {}) for name in ("complex64", "int16")]
        if collective in REDUCING:
            kinds += [(name, memory, {"op": "avg"}) for name in ("bfloat16", "int32")]
    return [
        make(collective, name, n, LARGE + i, memory=memory, **options)
        for i, (name, memory, options) in enumerate(kinds)
    ]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("collective", REDUCING + MOVING)
def test_results(collective, n):
    cases = of_every_kind(collective, n)
    assert run_processes(n, repeated, cases, timeout=100) == [[]] * n


@pytest.mark.parametrize("n", [1, 5, 8])
def test_results_of_threads(n):
    cases = [
        make(collective, "float32", n, LARGE + i, memory=memory)
        for collective in REDUCING + MOVING
        for i, memory in enumerate(("out", "symmetric", "misaligned"))
    ]
    assert run_threads(n, repeated, cases, timeout=100) == [[]] * n


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "two_shot_push", "one_shot"])
def test_algorithms(algorithm):
    cases = [
        make("all_reduce", "int32", 4, LARGE + i, memory=memory, algorithm=algorithm)
        for i, memory in enumerate(("out", "symmetric", "in_place", "symmetric_in_place"))
    ]
    assert run_processes(4, repeated, cases, timeout=100) == [[]] * 4
