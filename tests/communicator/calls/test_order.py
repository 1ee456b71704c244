"""The order of a reduction, to the bit: `tree` and `rank` against NumPy, for every type."""

import numpy as np
import pytest

import oracle
from cases import SMALL_CELLS, check, make
from pycoll.algorithms import ALGORITHMS
from pycoll.errors import ArgumentError
from pycoll.testing import run_processes, run_threads

ORDERS = ["tree", "rank"]
CLAIMANTS = [entry for entry in ALGORITHMS if entry.order in ORDERS]
WORLDS = [("threads", n) for n in (2, 3, 5, 6, 7, 8)] + [("processes", 3), ("processes", 4)]
SHARES = [("all_reduce", 131), ("reduce_scatter", 19), ("reduce", 131)]


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_bits_of_every_type_and_operation(world, order):
    n = world[1]
    cases = [
        make(collective, name, n, size, op=op, order=order)
        for collective, size in SHARES
        for name in oracle.FLOATS
        for op in oracle.ARITHMETIC
    ]
    for case in cases:
        case.options["order"] = order
    check(world, cases)


@pytest.mark.parametrize("world", [("threads", 7), ("processes", 3)], ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", oracle.FLOATS)
def test_bits_do_not_depend_on_size_or_memory(world, order, name):
    cases = [
        make("all_reduce", name, world[1], size, order=order, memory=memory)
        for size in (1, 9, 500, 20_000, 150_001)
        for memory in ("new", "in_place", "symmetric", "symmetric_in_place")
    ]
    for case in cases:
        case.options["order"] = order
    check(world, cases, timeout=100)


@pytest.mark.parametrize(
    ("entry", "n"),
    [(entry, n) for entry in CLAIMANTS for n in (2, 3, 6, 8) if entry.worlds(n)],
    ids=lambda x: x if isinstance(x, int) else f"{x.collective}-{x.name}",
)
def test_every_algorithm_that_claims_an_order_gives_it(entry, n):
    cases = [
        make(entry.collective, name, n, size, order=entry.order, op=op, memory=memory)
        for name in ("float32", "float64")
        for op in ("sum", "avg", "prod")
        if op != "avg" or "scan" not in entry.collective
        for size, memory in [(11, "new"), (3001, "new"), (3001, "symmetric")]
    ]
    for case in cases:
        case.options |= {"order": entry.order, "algorithm": entry.name}
    check(("threads", n), cases)
    check(("threads", n), cases, SMALL_CELLS)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("entry", CLAIMANTS, ids=lambda a: f"{a.collective}-{a.name}")
def test_narrow_floats_round_once_or_are_refused(entry, name):
    n = 6
    case = make(entry.collective, name, n, 501, order=entry.order)

    def rank(comm):
        call = getattr(comm, entry.collective)
        part = case.parts[comm.rank]
        try:
            result = call(part, order=entry.order, algorithm=entry.name)
        except ArgumentError as error:
            return f"refused: {error}"
        want = case.want[comm.rank]
        return "" if want is None else oracle.differences(result, want)

    results = run_threads(n, rank)
    refused = all(f"rounds {name} at every hop" in result for result in results)
    assert refused or results == [""] * n


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", oracle.FLOATS)
def test_special_values(run, order, name):
    row, n = oracle.special(name), 3
    grid = np.stack([g.reshape(-1) for g in np.meshgrid(*[np.arange(len(row))] * n)])
    parts = [row[g] for g in grid]
    wants = {op: oracle.reduce(parts, op, order) for op in oracle.ARITHMETIC}

    def rank(comm):
        results = {op: comm.all_reduce(parts[comm.rank], op, order=order) for op in wants}
        return {op: oracle.differences(results[op], wants[op]) for op in wants}

    assert run(n, rank) == [dict.fromkeys(wants, "")] * n


def test_the_sum_of_a_tree_is_the_tree_of_sums():
    """1 rank x 8 parts, 2 x 4, 4 x 2 and 8 x 1 agree to the bit."""
    parts = [oracle.random(np.random.default_rng(i), "float32", 777) for i in range(8)]

    def rank(comm):
        share = len(parts) // comm.world_size
        mine = parts[comm.rank * share : (comm.rank + 1) * share]
        return comm.all_reduce(oracle.tree(mine, np.add)).tobytes()

    results = {result for n in (1, 2, 4, 8) for result in run_threads(n, rank)}
    assert results == {oracle.tree(parts, np.add).tobytes()}
    assert oracle.serial(parts, np.add).tobytes() not in results


def test_repeated_runs_give_the_same_bits():
    def rank(comm):
        x = np.random.default_rng(comm.rank).standard_normal(4099).astype(np.float32)
        return {comm.all_reduce(x, order=order).tobytes() for order in ORDERS for _ in range(20)}

    results = run_processes(4, rank)
    assert len(results[0]) == len(ORDERS)
    assert results == results[:1] * 4


def test_any_order_is_close(run):
    parts = [oracle.random(np.random.default_rng(i), "float64", 10_007) for i in range(4)]
    bound = 8 * np.finfo(np.float64).eps * sum(np.abs(part) for part in parts)

    def rank(comm):
        result = comm.all_reduce(parts[comm.rank], order="any")
        return bool((np.abs(result - sum(parts)) <= bound).all())

    assert run(4, rank) == [True] * 4


def test_an_algorithm_of_another_order_is_refused(run):
    def rank(comm):
        with pytest.raises(ArgumentError, match=r"one_shot_rank.*gives order rank, not tree"):
            comm.all_reduce(np.ones(3), order="tree", algorithm="one_shot_rank")
        return comm.all_reduce(np.ones(3)).tolist()

    assert run(2, rank) == [[2.0] * 3] * 2
