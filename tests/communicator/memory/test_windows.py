"""Arrays of other ranks in place: what one rank stores all see after a fence."""

import numpy as np
import pytest

import pycoll
from pycoll.testing import run_processes


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "i4,f4"])
def test_every_rank_writes_to_every_other(run, n, dtype):
    def rank(comm):
        other = comm.empty(7 + 10 * comm.rank, np.uint8)  # so that places differ between ranks
        window = comm.window(comm.zeros((n, 3), dtype))
        assert window.local.dtype == dtype
        for turn in range(1, 4):
            for peer in range(n):
                window.at(peer)[comm.rank] = 20 * turn + 5 * comm.rank + peer
            comm.fence()
            expected = [20 * turn + 5 * r + comm.rank for r in range(n)]
            assert (window.local == np.repeat(expected, 3).reshape(n, 3).astype(dtype)).all()
            back = [window.at(peer)[comm.rank, 2] for peer in range(n)]
            assert back == [np.array(20 * turn + 5 * comm.rank + p).astype(dtype) for p in range(n)]
            comm.fence()
        assert other.size
        return True

    assert run(n, rank) == [True] * n


def test_a_ring_of_tokens():
    def rank(comm):
        window, n = comm.window(comm.zeros(1, np.int64)), comm.world_size
        for turn in range(2 * n):
            if comm.rank == turn % n:
                window.at((comm.rank + 1) % n)[0] = window.local[0] + 1
            comm.fence()
        return int(window.local[0])

    assert run_processes(3, rank) == [6, 4, 5]


def test_a_window_of_a_group():
    def rank(comm):
        group = comm.split(comm.rank % 2)
        window = group.window(group.zeros(4))
        window.at(group.world_size - 1)[group.rank] = comm.rank + 1
        group.fence()
        return window.local.tolist()

    found = run_processes(4, rank)
    assert found[2:] == [[1, 3, 0, 0], [2, 4, 0, 0]]
    assert found[:2] == [[0] * 4] * 2


def test_views_outlive_window_and_communicator():
    with pycoll.init() as comm:
        x = comm.zeros(5)
        view = comm.window(x).at(0)
        view[:] = 3
        assert x.tolist() == [3] * 5
    del comm
    assert view.sum() == 15


BAD = {
    "ordinary memory": (lambda c: np.ones(3), "takes an array in symmetric memory"),
    "a list": (lambda c: [1, 2], "C-contiguous NumPy array"),
    "no elements": (lambda c: c.zeros(0), "not empty"),
    "gaps": (lambda c: c.zeros((4, 4))[:, 1], "C-contiguous"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_refused_is_an_error_on_all(what):
    make, told = BAD[what]

    def rank(comm):
        x = make(comm) if comm.rank == 1 else comm.zeros(4)
        kind = pycoll.ArgumentError if comm.rank == 1 else pycoll.PeerRejected
        with pytest.raises(kind, match=told):
            comm.window(x)
        return int(comm.all_reduce(1))

    assert run_processes(2, rank) == [2, 2]


@pytest.mark.parametrize("odd", [((5,), np.float32), ((2, 2), np.float32), ((4,), np.int32)])
def test_arrays_that_differ(odd):
    def rank(comm):
        shape, dtype = odd if comm.rank == 1 else ((4,), np.float32)
        with pytest.raises(pycoll.ArgumentError, match="rank 1 has another shape or dtype"):
            comm.window(comm.zeros(shape, dtype))
        return int(comm.all_reduce(1))

    assert run_processes(2, rank) == [2, 2]


def test_ranks_there_are_not():
    with pycoll.init() as comm:
        window = comm.window(comm.zeros(2))
        for rank in (-1, 1, 0.0, "0"):
            with pytest.raises(pycoll.ArgumentError, match="ranks are 0 to 0"):
                window.at(rank)
