"""The reference interpreter finds what it is there to find."""

import pytest

from algorithms.reference import Trees, Wrong, run
from pycoll.schedule.ir import ACC, IN, OUT, TMP, algorithm, at, fold


def schedule(collective, n=4, **options):
    return lambda rounds: algorithm(collective, **options)(rounds).schedule(n)


@schedule("all_reduce", chunks=1)
def incomplete(rank, n):
    yield fold([at(rank, IN), at(rank + 1, IN)], to=at(rank, OUT))


@schedule("all_reduce", chunks=1)
def counted_twice(rank, n):
    yield fold([at(rank, IN), at(rank + 1, IN), at(rank, IN)], to=at(rank, OUT))


@schedule("all_reduce")
def mixed_chunks(rank, n):
    yield fold([at(rank, IN, 0), at(rank + 1, IN, 1)], to=at(rank, OUT))


@schedule("broadcast", chunks=1)
def no_input(rank, n):
    yield fold(at(rank, IN), to=at(rank, OUT))


@schedule("reduce", chunks=1)
def no_output(rank, n):
    yield fold(at(rank, IN), to=at(rank, OUT))


@schedule("all_gather")
def another_ones_block(rank, n):
    yield fold(at(rank, IN, rank + 1), to=at(rank, OUT, rank))


@schedule("all_reduce", chunks=1)
def reads_nothing(rank, n):
    yield fold(at(rank, OUT), to=at(rank, OUT))


@schedule("all_reduce", chunks=1, slots=1)
def undeclared_slot(rank, n):
    yield fold(at(rank, IN), to=at(rank, TMP, 1))


@schedule("all_reduce", chunks=1)
def overwrites_input(rank, n):
    yield fold(at(rank + 1, IN), to=at(rank, IN))


@schedule("all_reduce", n=2, chunks=1)
def exchange_in_output(rank, n):
    yield fold(at(rank, IN), to=at(rank, OUT))
    yield fold([at(rank, ACC), at(rank + 1, ACC)], to=at(rank, OUT))


@schedule("broadcast", chunks=1)
def two_writers(rank, n):
    yield fold(at(0, IN), to=[at(rank, OUT), at(rank + 1, OUT)])


@schedule("all_reduce", n=2, chunks=1)
def own_first(rank, n):
    yield fold([at(rank, IN), at(rank + 1, IN)], to=at(rank, OUT))


@schedule("all_reduce", chunks=1, order="tree")
def not_the_tree(rank, n):
    yield fold([at(r, IN) for r in range(n)], to=at(rank, OUT))


@schedule("all_reduce", chunks=1, order="rank")
def not_the_ranks(rank, n):
    yield fold([at(r, IN) for r in range(n)], to=at(rank, OUT), tree=True)


@schedule("all_gather")
def far_away(rank, n):
    yield fold(at(rank - 3 * n, IN, rank), to=at(rank, OUT, rank))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (incomplete, "holds"),
        (counted_twice, "counted twice"),
        (mixed_chunks, "different chunks"),
        (no_input, "has no IN"),
        (no_output, "has no OUT"),
        (another_ones_block, "has no IN"),
        (reads_nothing, "holds nothing"),
        (undeclared_slot, "slot 1 of 1"),
        (overwrites_input, "writes the input"),
        (exchange_in_output, "while"),
        (two_writers, "written twice"),
        (own_first, "disagree"),
        (not_the_tree, "in-order tree"),
        (not_the_ranks, "order is not that of the ranks"),
        (far_away, "out of range"),
    ],
)
def test_wrong_schedules_are_rejected(wrong, message):
    with pytest.raises(Wrong, match=message):
        run(wrong)


def test_in_place_conflicts_are_found():
    @schedule("all_reduce", n=4, chunks=1)
    def one_shot(rank, n):
        yield fold([at(r, IN) for r in range(n)], to=at(rank, OUT))

    run(one_shot)
    with pytest.raises(Wrong, match="while"):
        run(one_shot, in_place=True)


def shape(trees, number):
    pair = next((pair for pair, known in trees._known.items() if known == number), None)
    return number if pair is None else tuple(shape(trees, half) for half in pair)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, 0),
        (2, (0, 1)),
        (3, ((0, 1), 2)),
        (4, ((0, 1), (2, 3))),
        (5, (((0, 1), 2), (3, 4))),
        (6, (((0, 1), (2, 3)), (4, 5))),
        (7, (((0, 1), (2, 3)), ((4, 5), 6))),
    ],
)
def test_the_in_order_tree(n, expected):
    trees = Trees(n)
    assert shape(trees, trees.balanced(list(range(n)))) == expected


def test_the_serial_loop():
    trees = Trees(4)
    assert shape(trees, trees.chain([0, 1, 2, 3])) == (((0, 1), 2), 3)
