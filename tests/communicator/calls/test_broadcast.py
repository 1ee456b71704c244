"""Broadcast works in place: x is filled, and returned, unless there is an out."""

import numpy as np
import pytest

from pycoll.errors import ArgumentError, PeerRejected
from pycoll.testing import run_processes, run_threads


def fills_x(comm):
    """Return whether x took the root's values and was returned, however often it is called."""
    right = []
    for call in range(2 * comm.world_size + 1):
        root = call % comm.world_size
        for make in (np.empty, comm.empty):
            x = make((3, 5), np.float32)
            x[...] = 10 * comm.rank + call
            right.append(comm.broadcast(x, root) is x and (x == 10 * root + call).all())
    return all(right)


@pytest.mark.parametrize("run", [run_threads, run_processes])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_x_is_filled_and_returned(run, n):
    assert all(run(n, fills_x))


def with_out(comm):
    x, out = np.full(4, comm.rank), np.empty(4, int)
    found = comm.broadcast(x, 1, out=out)
    return found is out and (out == 1).all() and (x == comm.rank).all()


def test_out_leaves_x_alone():
    assert all(run_threads(3, with_out))


def from_any_root(comm):
    """Return what the others got from a root whose array is read-only, strided or a scalar."""
    at_root, seen = comm.rank == 0, []
    fixed = np.arange(4.0)
    fixed.flags.writeable = False
    symmetric = comm.zeros(4, np.float64)
    if at_root:
        symmetric.flags.writeable = False
    arrays = (fixed, np.arange(8.0)[::2], np.arange(4.0), symmetric)
    for given in arrays:
        x = given if at_root or given is symmetric else np.full(4, -1.0)
        before = given.copy()
        assert comm.broadcast(x) is x
        assert not at_root or (given == before).all()
        seen.append(x.tolist())
    return seen


def test_the_root_is_only_read():
    want = [[0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 4.0, 6.0], [0.0, 1.0, 2.0, 3.0], [0.0] * 4]
    assert run_threads(2, from_any_root) == [want] * 2


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda x: x.setflags(write=False) or x, "read-only.*broadcast fills x.*out="),
        (lambda x: np.repeat(x, 2)[::2], "not C-contiguous.*broadcast fills x"),
    ],
)
def test_what_cannot_be_filled_is_refused_by_all(spoil, text):
    def ranks(comm):
        x = np.ones(3)
        with pytest.raises(ArgumentError if comm.rank == 1 else PeerRejected, match=text):
            comm.broadcast(spoil(x) if comm.rank == 1 else x)
        return comm.broadcast(np.ones(2)).tolist()  # the communicator stays usable

    assert run_threads(2, ranks) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("number", [1.5, np.float64(1.5), np.float32(1.5), np.int8(-3), True])
def test_a_number(number):
    """It cannot be filled, so the root's is returned, as a number of its type."""

    def ranks(comm):
        got = comm.broadcast(number if comm.rank == 1 else type(number)(0), root=1)
        assert isinstance(got, np.generic)
        return got.dtype == np.asarray(number).dtype and got == number

    assert all(run_threads(3, ranks))


def later(comm):
    x = np.full(1000, comm.rank)
    return comm.broadcast(x, 1, async_op=True).wait() is x and (x == 1).all()


def test_in_the_background_and_planned():
    def planned(comm):
        x = np.full(10, comm.rank)
        plan = comm.plan("broadcast", like=x, root=1)
        return plan(x) is x and (x == 1).all()

    assert all(run_threads(2, later))
    assert all(run_threads(2, planned))
