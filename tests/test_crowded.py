"""More ranks than cores: every rank knows it, takes what suits it, and gets the same results."""

import os

import pytest

from cases import make, run_cases
from pycoll.testing import run_processes, run_threads
from test_programs import outcome, program  # noqa: F401

CORES = sorted(os.sched_getaffinity(0))


def plans(comm):
    return comm._session.plans


def calls_where_cores_are_few(comm, cases):
    """Run cases as if there was one core, and again in a group; return what is wrong."""
    comm._session.use(None, 1)
    group = comm.dup()
    assert plans(group).crowded
    return [wrong for each in (comm, group) for wrong in run_cases(each, cases)]


@pytest.mark.parametrize("order", ["tree", "rank"])
@pytest.mark.parametrize(("run", "n"), [(run_processes, 2), (run_processes, 3), (run_threads, 8)])
def test_results(run, n, order):
    kinds = [("float32", {}), ("int16", {"op": "avg"}), ("bfloat16", {})]
    cases = [
        make("all_reduce", name, n, count, memory=memory, order=order, **options)
        for name, options in kinds
        for memory in ("out", "in_place", "symmetric", "symmetric_in_place")
        for count in (600, 2_000, 4_000, 8_000, 9_000)
    ]
    for case in cases:
        case.options["order"] = order
    assert run(n, calls_where_cores_are_few, cases, timeout=60) == [[]] * n


ABOUT = """
comm = pycoll.init()
half = comm.split(comm.rank % 2)
told = [(c.world_size, c._session.cores, c._session.plans.crowded) for c in (comm, half)]
if comm.rank == 0:
    print(*told)
"""


@pytest.mark.parametrize("n", [1, 2, 6])
def test_a_job_counts_the_cores_of_all_its_ranks(program, n):  # noqa: F811
    """Also where every rank is bound to one."""
    bound = f"cores = {CORES}\nos.sched_setaffinity(0, [cores[os.getpid() % {len(CORES)}]])\n"
    expected = [(n, n > len(CORES)), ((n + 1) // 2, (n + 1) // 2 > len(CORES))]
    free = [(size, len(CORES), crowded) for size, crowded in expected]
    assert outcome(program(n, ABOUT)) == (0, f"{free[0]} {free[1]}\n", "")
    status, out, err = outcome(program(n, bound + ABOUT))
    assert (status, err) == (0, "")
    told = eval(f"[{out.replace(') (', '), (')}]")
    masks = min(n, len(CORES))
    assert all(1 <= cores <= masks for _, cores, _ in told)
    assert all(crowded == (size > cores) for size, cores, crowded in told)
