"""Arrays of other ranks in place: what one rank stores all see after a fence."""

import re

import numpy as np
import pytest

import pycoll
from pycoll.errors import ArgumentError
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


@pytest.mark.parametrize("dtype", ["i4", "i8", "u4", "u8", "f4", "f8"])
def test_no_addition_is_lost(dtype):
    def rank(comm):
        window = comm.window(comm.zeros((3, 4), dtype))
        old = [window.fetch_add(1, (2, 3), 1) for _ in range(500)]
        for _ in range(50):
            window.fetch_add(0, slice(1, None), [1, 2, 3, 4])
            window.fetch_add(0, (..., slice(None, None, 2)), np.full((3, 2), 10, dtype))
        comm.fence()
        total = window.fetch_add(1, (2, 3), 0)
        assert type(total) is np.dtype(dtype).type
        return old, int(total), window.at(0).tolist()

    found = run_processes(3, rank)
    assert sorted(i for old, *_ in found for i in old) == list(range(1500))
    rows = [[1500, 0, 1500, 0], *[[1650, 300, 1950, 600]] * 2]
    assert all((total, at) == (1500, rows) for _, total, at in found)


@pytest.mark.parametrize("dtype", ["i4", "u8"])
def test_one_rank_takes_what_is_free(dtype):
    def rank(comm):
        me, window = comm.rank + 1, comm.window(comm.zeros(400, dtype))
        order = [(i * (2 * comm.rank + 1)) % 400 for i in range(400)]
        mine = [i for i in order if window.compare_swap(0, i, 0, me) == 0]
        comm.fence()
        assert all(window.at(0)[i] == me for i in mine)
        old = window.compare_swap(comm.rank, slice(0, 2), [me, 7], 9)
        return mine, old.tolist()

    found = run_processes(3, rank)
    assert sorted(i for mine, _ in found for i in mine) == list(range(400))
    assert found[1][1] == found[2][1] == [0, 0]


MISUSED = {
    "at(3): ranks are 0 to 0": lambda w: w.fetch_add(3, 0, 1),
    "fetch_add: index 9 is out of bounds": lambda w: w.fetch_add(0, 9, 1),
    "integers and slices for the place, not [0, 1]": lambda w: w.fetch_add(0, [0, 1], 1),
    "integers and slices for the place, not True": lambda w: w.compare_swap(0, True, 0, 1),
    "1.5 is not for an element of int32": lambda w: w.fetch_add(0, 0, 1.5),
    "int32: integers of int32 are from -2147483648 to 2": lambda w: w.fetch_add(0, 0, 1 << 40),
    "[1, 2] is not for elements of int32 and shape (4,)": lambda w: w.fetch_add(0, ..., [1, 2]),
    "'a' is not for an element": lambda w: w.compare_swap(0, 0, "a", 1),
}


@pytest.mark.parametrize("told", MISUSED)
def test_what_is_no_place_or_value(told):
    with pycoll.init() as comm:
        window = comm.window(comm.zeros(4, np.int32))
        with pytest.raises(ArgumentError, match=re.escape(told)):
            MISUSED[told](window)
        assert not window.local.any()


@pytest.mark.parametrize("dtype", ["i2", "c8", ">i4", "?"])
def test_elements_that_nothing_changes_in_one_step(dtype):
    with pycoll.init() as comm:
        window = comm.window(comm.zeros(4, dtype))
        with pytest.raises(ArgumentError, match="integers or floats of 4 or 8 bytes"):
            window.fetch_add(0, 0, 1)
        floats = comm.window(comm.zeros(4, np.float32))
        with pytest.raises(ArgumentError, match=r"integers of 4 or 8 bytes, and.*float32"):
            floats.compare_swap(0, 0, 0, 1)
        odd = comm.window(comm.zeros(9, np.uint8)[1:].view(np.int32))
        with pytest.raises(ArgumentError, match="addresses that their size divides"):
            odd.fetch_add(0, 0, 1)


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
