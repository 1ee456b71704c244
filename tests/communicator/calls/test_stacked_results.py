"""Results with a dimension for the rank, as the buffers of mpi4py's programs have them."""

import numpy as np
import pytest

from pycoll.errors import ArgumentError, PeerRejected

SHAPES = [(3,), (3, 2), (), (1, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_ranks_contribute_is_stacked(run, shape):
    def rank(comm):
        n, me = comm.world_size, comm.rank
        x = np.full(shape, me, np.int64)
        want = np.stack([np.full(shape, r) for r in range(n)])
        for _ in range(2):
            out = np.empty_like(want)
            assert comm.all_gather(x, out=out) is out
            assert np.array_equal(out, want)
            got = comm.gather(x, root=n - 1, out=out if me == n - 1 else None)
            assert got is (out if me == n - 1 else None)
            assert np.array_equal(out, want)
        return True

    for n in (1, 2, 3):
        assert run(n, rank) == [True] * n


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1,)])
def test_a_block_has_no_dimension_for_the_rank(run, shape):
    def rank(comm):
        n, me = comm.world_size, comm.rank
        x = np.arange(n * np.prod(shape)).reshape(n, *shape)
        for _ in range(2):
            out = np.empty(shape, np.int64)
            assert comm.scatter(x if me == 0 else None, out=out) is out
            assert np.array_equal(out, x[me])
            assert comm.scatter(x, root=n - 1, out=out) is out
            assert np.array_equal(out, x[me])
            assert comm.reduce_scatter(x, out=out) is out
            assert np.array_equal(out, n * x[me])
        assert comm.reduce_scatter(x).shape == (1, *shape)  # without an out it stays
        return True

    for n in (1, 2, 3):
        assert run(n, rank) == [True] * n


@pytest.mark.parametrize("op", [np.add, lambda a, b: a + b])
def test_results_of_functions_are_stacked_likewise(run, op):
    def rank(comm):
        n, me = comm.world_size, comm.rank
        x = np.arange(6.0 * n).reshape(n, 2, 3)
        out = np.empty((2, 3))
        assert comm.reduce_scatter(x, op, out=out) is out
        return np.array_equal(out, n * x[me])

    assert run(2, rank) == [True] * 2


def test_other_shapes_are_refused(run):
    def rank(comm):
        me, error = comm.rank, ArgumentError if comm.rank == 1 else PeerRejected
        for shape in ((3, 2), (6, 1), (1, 6)):
            with pytest.raises(error, match=r"this call writes shape \(6,\) or \(2, 3\)"):
                comm.all_gather(np.zeros(3), out=np.zeros(shape if me == 1 else 6))
        with pytest.raises(error, match=r"this call writes shape \(3,\)$|shape \(3,\)"):
            comm.all_reduce(np.zeros(3), out=np.zeros((1, 3) if me == 1 else 3))
        return comm.all_reduce(1)

    assert run(2, rank) == [2, 2]
