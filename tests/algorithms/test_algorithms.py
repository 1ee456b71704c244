"""What every algorithm has to keep, for world sizes from 1 to 64."""

import inspect
import math

import numpy as np
import pytest

from algorithms.reference import Wrong, run
from pycoll.algorithms import ALGORITHMS, find, names
from pycoll.errors import ScheduleError
from pycoll.schedule.language.collectives import COLLECTIVES
from samples import sample

EVERY = [pytest.param(a, id=f"{a.collective}-{a.name}") for a in ALGORITHMS]
SOME_SIZES = (*range(1, 9), 12, 13, 16, 27, 32, 33)
SIZES = sample(range(1, 65), (*range(1, 18), 21, 24, 27, 31, 32, 33, 40, 47, 64))
SLOW = {("all_to_all", "bruck")}  # many folds of one chunk


def parameters(entry, n):
    """Yield sets of parameters: several roots and numbers of blocks."""
    roots = sorted({0, n // 2, n - 1}) if "root" in entry.params else [None]
    blocks = ((1, 2, 3, 8, 17) if n <= 20 else (1, 17)) if "k" in entry.params else [None]
    for root in roots:
        for k in blocks:
            given = {"root": root, "k": k}
            yield {name: value for name, value in given.items() if value is not None}


def schedules(entry, sizes):
    for n in sizes:
        if entry.worlds(n):
            for params in parameters(entry, n):
                yield entry.schedule(n, **params)


@pytest.mark.parametrize("entry", EVERY)
def test_promises_are_kept(entry):
    """Post-condition, conflicts, order and scratch, out of place and, where claimed, in place.

    Beyond 32 ranks, odd world sizes are run in place and even ones out of place.
    """
    slow = (entry.collective, entry.name) in SLOW
    for schedule in schedules(entry, SOME_SIZES if slow else SIZES):
        both = schedule.n <= 32 or schedule.n == 64
        outcome = None
        if both or schedule.n % 2 == 0 or not entry.in_place:
            outcome = run(schedule)
        if entry.in_place and (both or schedule.n % 2):
            outcome = run(schedule, in_place=True)
        assert outcome.slots == schedule.slots, f"{schedule} uses fewer slots than it declares"


@pytest.mark.parametrize("entry", [p for p in EVERY if not p.values[0].in_place])
def test_out_of_place_only_where_needed(entry):
    with pytest.raises(Wrong, match=r"while|counted twice"):
        run(entry.schedule(8), in_place=True)


def written_out(schedule, ranks):
    """List the folds of some ranks, with every number as an array over the ranks."""
    width = np.shape(np.atleast_1d(ranks))
    rows = []
    for number, folds in enumerate(schedule.rounds(ranks)):
        for f in folds:
            arity = number, len(f.srcs), len(f.dsts), f.tree
            buffers = [piece.buffer for piece in f.pieces]
            count = np.broadcast_to(f.count, width) * np.broadcast_to(f.where, width)
            columns = [count]
            for piece in f.pieces:
                columns += [np.broadcast_to(piece.rank, width), np.broadcast_to(piece.chunk, width)]
            rows.append((arity, buffers, np.stack(columns)))
    return rows


def agree(rows, others, columns):
    """Compare two forms; what a masked fold would do does not matter."""
    assert len(rows) == len(others), "the number of lines depends on the ranks"
    for (arity, buffers, numbers), (other_arity, other_buffers, other) in zip(
        rows, others, strict=True
    ):
        assert (arity, buffers) == (other_arity, other_buffers)
        numbers = numbers[:, columns]
        np.testing.assert_array_equal(np.where(numbers[0] > 0, numbers, 0), other * (other[0] > 0))


@pytest.mark.parametrize("entry", EVERY)
def test_forms_agree(entry):
    """One rank, some ranks and all ranks are told the same."""
    for schedule in schedules(entry, (1, 2, 3, 4, 5, 7, 8, 12, 16, 21)):
        everyone = schedule.all_ranks()
        rows = written_out(schedule, everyone)
        some = everyone[::-2].copy()
        agree(rows, written_out(schedule, some), some)
        for rank in {0, schedule.n // 2, schedule.n - 1}:
            agree(rows, written_out(schedule, rank), [rank])


@pytest.mark.parametrize("entry", EVERY)
def test_ranks_are_left_alone(entry):
    """A generator does not write into the vector of ranks that it was given."""
    for schedule in schedules(entry, (6, 8)):
        ranks = schedule.all_ranks()
        ranks.flags.writeable = False
        for _ in schedule.rounds(ranks):
            pass


@pytest.mark.parametrize("entry", EVERY)
def test_every_algorithm_is_short_and_documented(entry):
    function = inspect.unwrap(entry.rounds)
    source = inspect.getsource(function)
    doc = inspect.getdoc(function)
    body = source[source.index('"""', source.index('"""') + 3) + 3 :]
    assert len(body.strip().splitlines()) <= 25
    assert "Cost: " in doc
    assert "Source: " in doc
    assert entry.doc.endswith(".")


def test_names_are_unique():
    keys = [(entry.collective, entry.name) for entry in ALGORITHMS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_has_algorithms_for_every_world_size(collective):
    found = [find(collective, name) for name in names(collective)]
    assert {entry.collective for entry in found} == {collective}
    assert any(all(entry.worlds(n) for n in range(1, 1025)) for entry in found)
    if COLLECTIVES[collective].reduces:
        either = {"tree", "rank"} | ({"any"} if COLLECTIVES[collective].prefix is None else set())
        assert {entry.order for entry in found} == either
    else:
        assert {entry.order for entry in found} == {""}


def test_unknown_names_say_what_there_is():
    with pytest.raises(
        ScheduleError, match=r"'rnig'; did you mean 'ring'\? known: ring, .*pairwise"
    ):
        find("reduce_scatter", "rnig")
    with pytest.raises(ScheduleError, match=r"'xyz'; known: direct, binomial"):
        find("gather", "xyz")
    with pytest.raises(ScheduleError, match=r"'allreduce'; did you mean 'all_reduce'"):
        find("allreduce", "ring")


def log2(n):
    return math.ceil(math.log2(n))


ROUNDS = {
    ("all_reduce", "ring"): lambda n, k: 2 * (n - 1),
    ("reduce_scatter", "ring"): lambda n, k: n - 1,
    ("all_gather", "ring"): lambda n, k: n - 1,
    ("broadcast", "ring"): lambda n, k: n - 2 + k if n > 1 else 0,
    ("reduce", "ring"): lambda n, k: n - 2 + k if n > 1 else 0,
    ("all_reduce", "halving_doubling"): lambda n, k: 2 * math.floor(math.log2(n)),
    ("all_reduce", "recursive_doubling"): lambda n, k: math.floor(math.log2(n)),
    ("reduce_scatter", "halving"): lambda n, k: math.floor(math.log2(n)),
    ("all_gather", "doubling"): lambda n, k: math.floor(math.log2(n)),
    ("all_reduce", "circulant"): lambda n, k: 2 * log2(n),
    ("reduce_scatter", "circulant"): lambda n, k: log2(n),
    ("all_gather", "circulant"): lambda n, k: log2(n),
    ("broadcast", "circulant"): lambda n, k: k - 1 + log2(n) if n > 1 else 0,
    ("reduce", "circulant"): lambda n, k: k - 1 + log2(n) if n > 1 else 0,
    ("all_reduce", "double_tree"): lambda n, k: k - 1 + 2 * log2(n) if n > 1 else 0,
    ("broadcast", "binomial"): lambda n, k: log2(n),
    ("reduce", "binomial"): lambda n, k: math.floor(math.log2(n)),
    ("gather", "binomial"): lambda n, k: log2(n),
    ("scatter", "binomial"): lambda n, k: log2(n),
    ("all_gather", "bruck"): lambda n, k: log2(n),
    ("all_to_all", "bruck"): lambda n, k: log2(n),
    ("all_to_all", "pairwise"): lambda n, k: n - 1,
}


@pytest.mark.parametrize("key", ROUNDS, ids="-".join)
def test_rounds(key):
    for schedule in schedules(find(*key), SOME_SIZES):
        expected = ROUNDS[key](schedule.n, schedule.params.get("k", 1))
        assert run(schedule).rounds == expected, str(schedule)


@pytest.mark.parametrize(
    ("key", "per_rank"),
    [
        (("all_reduce", "ring"), 2),
        (("all_reduce", "circulant"), 2),
        (("all_reduce", "two_shot_push"), 2),
        (("all_reduce", "two_shot_pull"), 2),
        (("reduce_scatter", "ring"), 1),
        (("reduce_scatter", "circulant"), 1),
        (("reduce_scatter", "direct"), 1),
        (("reduce_scatter", "pairwise"), 1),
        (("all_gather", "ring"), 1),
        (("all_gather", "circulant"), 1),
        (("all_gather", "bruck"), 1),
        (("all_gather", "direct_pull"), 1),
        (("all_gather", "direct_push"), 1),
        (("all_to_all", "direct"), 1),
        (("all_to_all", "pairwise"), 1),
    ],
    ids=str,
)
def test_volume_is_the_least_there_can_be(key, per_rank):
    """Every rank moves n - 1 blocks, once or twice."""
    for schedule in schedules(find(*key), SOME_SIZES):
        assert run(schedule).moved == [per_rank * (schedule.n - 1)] * schedule.n


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
def test_volume_of_halving_doubling(n):
    outcome = run(find("all_reduce", "halving_doubling").schedule(n))
    assert outcome.moved == [2 * (n - 1)] * n
