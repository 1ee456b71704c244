"""What the author of a first algorithm is told about its commonest mistakes."""

import numpy as np
import pytest

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import IN, OUT, algorithm, at, fold
from pycoll.schedule.proof.verify import prove


@algorithm("all_reduce", "one line", chunks=1)
def one_line(rank, n):
    yield fold([at(peer, IN) for peer in range(n)], to=at(rank, OUT))


@algorithm("all_reduce", "for one", chunks=1)
def for_one(rank, n):
    if rank == 0:
        yield fold([at(peer, IN) for peer in range(n)], to=at(rank, OUT))


@algorithm("all_reduce", "looked up", chunks=1)
def looked_up(rank, n):
    yield fold(at([1, 2, 0][rank], IN), to=at(rank, OUT))


@algorithm("all_reduce", "some trees", chunks=1)
def some_trees(rank, n):
    yield fold([at(peer, IN) for peer in range(n)], to=at(rank, OUT), tree=rank % 2 == 0)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (one_line, "direct, in place.*an algorithm that cannot work so says in_place=False"),
        (for_one, r"truth value.*`rank` stands for all ranks.*where=rank == 0"),
        (looked_up, r"`rank` stands for all ranks.*np\.array\(\[\.\.\.\]\)\[rank\]"),
        (some_trees, r"test_hints\.py:\d+: fold\(\): tree is .*expected True or False"),
    ],
)
def test_what_is_told(made, told):
    with pytest.raises(ScheduleError, match=told):
        prove(made.schedule(3))


def test_what_has_failed_otherwise_gets_no_hint():
    @algorithm("all_reduce", "nothing", chunks=1)
    def nothing(rank, n):
        yield fold(at(rank, IN), to=at(rank, OUT), where=np.zeros(n, bool))

    with pytest.raises(ScheduleError) as caught:
        prove(nothing.schedule(3))
    assert "in_place" not in str(caught.value)
