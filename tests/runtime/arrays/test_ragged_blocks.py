"""Sizes of blocks: what is accepted, and that blocks of a table lie side by side."""

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import view
from pycoll.runtime.arrays.ragged_blocks import check_counts, check_matrix, exchanged, sizes_of
from pycoll.types import Kind


def test_blocks_of_an_exchange():
    """What rank s sends to d, and what d gets of s, are as long, and fill both arrays."""
    sent = np.array([[1, 0, 3], [2, 2, 0], [0, 5, 1]], np.uint64)
    where = exchanged(sent)
    assert (where.out_length == sent.T).all()
    for offset, length in (
        (where.in_offset, where.in_length),
        (where.out_offset, where.out_length),
    ):
        for starts, sizes in zip(offset.tolist(), length.tolist(), strict=True):
            assert starts == [sum(sizes[:k]) for k in range(3)]


@pytest.mark.parametrize("counts", [[1], [1, -1], [1.0, 2.0], "ab", [1 << 60, 1], [[1, 2]]])
def test_counts_of_no_use(counts):
    with pytest.raises(ArgumentError, match="counts"):
        check_counts(counts, 2, None)
    with pytest.raises(ArgumentError, match="counts"):
        check_matrix(counts, 2, 0, 3)


def test_sizes_of_all_ranks():
    xs = [view(np.ones((k, 2)), "x") for k in (3, 1)]
    gathered = sizes_of(Kind.ALL_GATHER_V, xs, None, 2)
    assert gathered.rows_out == [4, 4]
    assert gathered.layout(1).out_offset.tolist() == [[0, 6], [0, 6]]
    moved = sizes_of(Kind.ALL_TO_ALL_V, xs, [[1, 2], [0, 1]], 2)
    assert moved.rows_out == [1, 3]
    with pytest.raises(ArgumentError, match="x has 1 rows"):
        sizes_of(Kind.REDUCE_SCATTER_V, xs, [1, 2], 2)
