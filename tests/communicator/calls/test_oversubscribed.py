"""More ranks than cores: every rank knows it, takes what suits it, and gets the same results."""

import os

import pytest

from cases import make, run_cases
from project.test_programs import outcome, program  # noqa: F401
from pycoll.runtime.selection.tuning_table import TunedRule, Tuning, World, fingerprint
from pycoll.runtime.startup.hosts import Sharing
from pycoll.schedule.cost.cost import Machine
from pycoll.testing import run_processes, run_threads

CORES = sorted(os.sched_getaffinity(0))


def plans(comm):
    return comm._session.plans


def calls_where_cores_are_few(comm, cases):
    """Run cases as if there was one core, and again in a group; return what is wrong."""
    comm._session.use(None, Sharing(comm.world_size, 1))
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
told = [(c.world_size, *c._session.sharing, c._session.plans.crowded) for c in (comm, half)]
if comm.rank == 0:
    print(*told)
"""


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_a_job_counts_the_cores_of_all_its_ranks(program, n, bound):  # noqa: F811
    """Also where every rank is bound to one; its groups work at the same time."""
    core = f'{CORES}[int(os.environ["PYCOLL_RANK"]) % {len(CORES)}]'
    binding = f"os.sched_setaffinity(0, [{core}])\n" if bound else ""
    cores = min(n, len(CORES)) if bound else len(CORES)
    told = " ".join(str((size, n, cores, n > cores)) for size in (n, (n + 1) // 2))
    assert outcome(program(n, binding + ABOUT)) == (0, f"{told}\n", "")


def test_calls_made_at_the_start_choose_nothing_for_later_ones(program, tmp_path):  # noqa: F811
    """What a rank remembers of them would hide the table of measured times from it alone."""
    path = tmp_path / "table.json"
    rules = tuple(
        TunedRule(collective, order, False, 0, 1 << 30, algorithm, 1e-6, "one", 2e-6)
        for collective, order, algorithm in (
            ("all_reduce", "tree", "recursive_doubling"),
            ("broadcast", "", "ring"),
        )
    )
    world = World("shared memory", (2,), Machine(), (), rules)
    path.write_text(Tuning(fingerprint(), (world,)).to_json())
    text = f"""
comm = pycoll.init(tuning={str(path)!r})
for count, kind, call in ((16, np.uint64, "all_reduce"), (1, np.int64, "broadcast")):
    x = np.zeros((count,) if comm.rank else (count, 1), kind)
    getattr(comm, call)(x, out=x, **({{"op": "or"}} if call == "all_reduce" else {{}}))
"""
    assert outcome(program(2, text)) == (0, "", "")
