"""Calls of many kinds in turn, of which none pushes another out, and on arrays of many kinds."""

import array
import pickle

import numpy as np
import pytest

from pycoll.errors import ArgumentError, MismatchError
from without_python import without_python


def test_three_hundred_shapes(run):
    """Of so many hardly any is forgotten before it comes again, wherever their types lie."""

    def rank(comm):
        arrays = [np.ones(i + 1, np.float32) for i in range(300)]
        outs = [np.empty_like(x) for x in arrays]
        prepared = []
        for _ in range(2):
            for x, out in zip(arrays, outs, strict=True):
                comm.all_reduce(x, out=out)
        session, prepare = comm._session, comm._session.prepare
        session.prepare = lambda *call: prepared.append(call) or prepare(*call)
        for x, out in zip(arrays, outs, strict=True):
            assert (comm.all_reduce(x, out=out) == comm.world_size).all()
        del session.prepare
        return len(prepared)

    assert max(run(2, rank)) < 30


def test_more_kinds_than_are_remembered(run):
    def rank(comm):
        for _ in range(2):
            for i in range(3000):
                assert comm.all_reduce(np.ones(i % 1500 + 1))[-1] == comm.world_size
        return True

    assert all(run(2, rank))


def unpickled(x):
    """Return a copy whose dtype is an object of its own."""
    copy = pickle.loads(pickle.dumps(x))
    assert copy.dtype is not x.dtype
    return copy


class Plain(np.ndarray):
    """A subclass that adds nothing."""


KINDS = {
    "out of a pickle": lambda: unpickled(np.arange(4.0)),
    "short texts": lambda: np.array([b"a", b"bc"]),
    "a subclass": lambda: np.arange(4.0).view(Plain),
    "a subclass with gaps": lambda: np.arange(8.0).view(Plain)[::2],
    "a bytearray": lambda: bytearray(b"abcd"),
    "an array.array": lambda: array.array("d", [1.0, 2.0]),
    "a memoryview": lambda: memoryview(array.array("i", [1, 2])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_are_seen_without_python(run, kind):
    def rank(comm):
        comm.all_gather(KINDS[kind]())
        with without_python(comm):
            found = comm.all_gather(KINDS[kind]())
        want = np.concatenate([np.asarray(KINDS[kind]())] * comm.world_size)
        assert type(found) is np.ndarray
        assert found.dtype == want.dtype
        return np.array_equal(found, want)

    assert run(2, rank) == [True] * 2


def test_a_mask_is_not_lost(run):
    def rank(comm):
        comm.all_reduce(np.ones(3))
        masked = np.ma.masked_array(np.ones(3), [True, False, False])
        with pytest.raises(ArgumentError, match="masked"):
            comm.all_reduce(masked)
        return True

    assert all(run(2, rank))


def test_dates_of_equal_types_keep_their_names(run):
    """1000 ms and 1 s are equal for NumPy, and different element types for ranks."""

    def rank(comm):
        for unit in ("M8[s]", "M8[1000ms]"):
            comm.all_gather(np.zeros(2, unit))
        mine = "M8[1000ms]" if comm.rank else "M8[s]"
        with pytest.raises(MismatchError):
            comm.all_gather(np.zeros(2, mine))
        return True

    assert all(run(2, rank))


@pytest.mark.parametrize("make", [np.int64, np.uint8])
def test_a_root_of_numpy(run, make):
    def rank(comm):
        x = np.ones(3)
        comm.reduce(x, root=1)
        with without_python(comm):
            found = comm.reduce(x, root=make(1))
        return None if found is None else found.tolist()

    assert run(2, rank) == [None, [2.0] * 3]


@pytest.mark.parametrize("root", [np.float64(1), np.bool_(True), np.int64(7)])
def test_a_root_of_numpy_that_is_no_rank(run, root):
    def rank(comm):
        comm.reduce(np.ones(3), root=1)
        with pytest.raises(ArgumentError, match="is not a rank"):
            comm.reduce(np.ones(3), root=root)
        return True

    assert all(run(2, rank))


def test_a_hundred_lines_of_one_function(run):
    """Hardly any of them is asked for again: they do not take each other's room."""
    lines = "\n".join("    comm.all_reduce(x, out=out)" for _ in range(100))

    def rank(comm):
        names, asked = {}, []
        exec(f"def calls(comm, x, out):\n{lines}", names)
        x, out = np.ones(3), np.empty(3)
        for _ in range(2):
            names["calls"](comm, x, out)
        session, site = comm._session, comm._session.site
        session.site = lambda: asked.append(1) or site()
        names["calls"](comm, x, out)
        del session.site
        return len(asked)

    assert max(run(2, rank)) < 40
