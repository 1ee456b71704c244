"""What docstrings state about costs is what schedules cost."""

import re
from fractions import Fraction

import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.algorithms.locality.grid import grid
from pycoll.errors import ScheduleError
from pycoll.schedule.cost.cost import cost
from pycoll.schedule.ir import IN, OUT, algorithm, at, fold
from pycoll.schedule.language.formula import evaluate, stated

EVERY = [pytest.param(a, id=f"{a.collective}-{a.name}") for a in ALGORITHMS]
PROSE = ("hierarchical", "hierarchical_tree", "hierarchical_ring", "bucket")  # that of their parts


def limits(algorithm, n, k=1):
    """Evaluate what the docstring states for the busiest rank.

    Returns the number of rounds, and the least and the most it moves, in full vectors.
    """
    text = stated(algorithm)
    rounds = evaluate(text.rounds, n, k)
    most = evaluate(text.nbytes.removeprefix("at most "), n, k)
    least = Fraction(0) if text.nbytes.startswith("at most ") else most
    if text.rest == " read and as many written per rank":
        return rounds, 2 * least, 2 * most
    at_root = re.fullmatch(r", (.+) at the (?:root|last rank)", text.rest)
    if at_root:
        root = evaluate(at_root.group(1), n, k)
        return rounds, root, root
    place = r"(?: at the root| at the busiest rank)?"
    more = re.fullmatch(place + r"(?:, and at most (.+) more if n > p)?", text.rest)
    if more is None:
        raise ScheduleError(f"{algorithm.collective}/{algorithm.name}: cannot read {text.rest!r}")
    extra = more.group(1)
    return rounds, least, most + (evaluate(extra, n, k) if extra and n & (n - 1) else 0)


@pytest.mark.parametrize("entry", [p for p in EVERY if p.values[0].name not in PROSE])
def test_stated_costs_are_true(entry):
    for n in (2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 32, 33):
        if not entry.worlds(n):
            continue
        spent = cost(entry.schedule(n))
        rounds, least, most = limits(entry, n, entry.params.get("k", 1))
        assert spent.rounds == rounds, f"n = {n}"
        assert least <= spent.per_rank <= most, f"n = {n}"


@pytest.mark.parametrize("entry", EVERY)
def test_every_algorithm_names_its_source(entry):
    assert len(stated(entry).source) > 20


@pytest.mark.parametrize("name", PROSE)
def test_prose_is_no_formula(name):
    with pytest.raises(ScheduleError, match="formula"):
        limits(find("all_reduce", name), 4)


@pytest.mark.parametrize("n", [2, 3, 4, 6, 7, 12, 16, 32])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_buckets_cost_what_their_rings_do(n, axes):
    spent = cost(find("all_reduce", "bucket").schedule(n, axes=axes))
    assert spent.rounds == 2 * sum(length - 1 for length in grid(n, axes))
    assert spent.per_rank == Fraction(2 * (n - 1), n)


@pytest.mark.parametrize(("n", "trees"), [(8, 1), (8, 2), (16, 4), (32, 8), (13, 2)])
def test_trees_of_pat(n, trees):
    p, levels = 1 << (n - 1).bit_length(), trees.bit_length() - 1
    gathered = cost(find("all_gather", "pat").schedule(n, trees=trees))
    summed = cost(find("reduce_scatter", "pat").schedule(n, trees=trees))
    assert gathered.rounds <= levels + p // trees - 1
    assert summed.rounds <= levels + p // (2 * trees)
    if n == p:
        assert gathered.rounds == levels + p // trees - 1


def test_formulas():
    assert evaluate("2 (n - 1) / n * m", 8) == Fraction(7, 4)
    assert evaluate("m log2 p", 9) == 3
    assert evaluate("ceil(log2 n) + k - 1", 9, k=4) == 7
    assert evaluate("2 ceil(log2 n)", 5) == 6
    for wrong in ("2 +", "q", "__import__('os')", "n ** 9", "x.y"):
        with pytest.raises(ScheduleError, match="formula"):
            evaluate(wrong, 4)


def stating(cost_line):
    """Make an algorithm with this docstring."""

    def rounds(rank, n):
        yield fold(at(rank, IN), to=at(rank, OUT))

    rounds.__doc__ = f"Do it.\n\n    {cost_line}\n    Source: nowhere.\n    "
    return algorithm("broadcast", "made_up")(rounds)


def test_forms_of_a_cost():
    assert limits(stating("Cost: 1 round; m bytes per rank."), 4) == (1, 1, 1)
    assert limits(stating("Cost: 1 round; m / 2 bytes read and as many written per rank."), 4) == (
        1,
        1,
        1,
    )
    at_root = stating("Cost: 1 round; m bytes per rank, (n - 1) * m at the root.")
    assert limits(at_root, 4) == (1, 3, 3)
    more = stating("Cost: 2 rounds; m bytes per rank, and at most 2 m more if n > p.")
    assert limits(more, 4) == (2, 1, 1)
    assert limits(more, 5) == (2, 1, 3)
    at_most = stating("Cost: 1 round; at most m bytes at the busiest rank.")
    assert limits(at_most, 4) == (1, 0, 1)
    for wrong in (
        "Cost: little.",
        "Costs: 1 round; m bytes",
        "Cost: 1 round; m bytes, or so.",
    ):
        with pytest.raises(ScheduleError, match="made_up"):
            limits(stating(wrong), 4)


def test_a_wrong_statement_is_seen():
    ring = find("all_reduce", "ring")
    rounds, least, most = limits(ring, 6)
    halving = cost(find("all_reduce", "recursive_doubling").schedule(6))
    assert halving.rounds != rounds
    assert not least <= halving.per_rank <= most
