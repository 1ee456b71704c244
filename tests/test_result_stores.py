"""Large results are stored in one of two ways, by the time that each takes: always the same bytes.

Of equal calls the first seven store in the ordinary way, the next four past the caches.
"""

import pytest

from cases import IN_PLACE, MOVING, PRIVATE, REDUCING, SYMMETRIC, make, run_cases
from pycoll.testing import run_processes, run_threads

EQUAL_CALLS = 11
LARGE = 5_003  # elements of one rank's share: of any type and world, at least 16 KiB of results


def repeated(comm, cases):
    """Run each case often enough for both ways; return what is wrong."""
    return [wrong for case in cases for wrong in run_cases(comm, [case] * EQUAL_CALLS)]


def of_every_kind(collective, n):
    """Return cases of all kinds of memory, some types, and averages."""
    memories = PRIVATE + SYMMETRIC
    if collective not in IN_PLACE:
        memories = [memory for memory in memories if not memory.endswith("in_place")]
    cases = [
        make(collective, "float32", n, LARGE + i, memory=memory)
        for i, memory in enumerate(memories)
    ]
    for memory in ("out", "symmetric", "symmetric_misaligned"):
        cases += [
            make(collective, name, n, 2 * LARGE, memory=memory) for name in ("complex64", "int16")
        ]
        if collective in REDUCING:
            cases.append(make(collective, "bfloat16", n, 2 * LARGE, op="avg", memory=memory))
            cases.append(make(collective, "int32", n, LARGE, op="avg", memory=memory))
    return cases


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("collective", REDUCING + MOVING)
def test_results(collective, n):
    cases = of_every_kind(collective, n)
    assert run_processes(n, repeated, cases, timeout=100) == [[]] * n


@pytest.mark.parametrize("n", [1, 5, 8])
def test_results_of_threads(n):
    cases = [
        make(collective, "float32", n, LARGE, memory=memory)
        for collective in REDUCING + MOVING
        for memory in ("out", "symmetric", "misaligned")
    ]
    assert run_threads(n, repeated, cases, timeout=100) == [[]] * n


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "two_shot_push", "one_shot"])
def test_algorithms(algorithm):
    cases = [
        make("all_reduce", "int32", 4, 4 * LARGE, memory=memory, algorithm=algorithm)
        for memory in ("out", "symmetric", "in_place", "symmetric_in_place")
    ]
    assert run_processes(4, repeated, cases, timeout=100) == [[]] * 4
