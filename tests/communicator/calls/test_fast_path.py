"""Calls like earlier ones reach the engine without Python code, and only those that may."""

import time

import numpy as np
import pytest

from pycoll.comm.communicator import Communicator
from pycoll.errors import ArgumentError, CollError, CollTimeout, MismatchError
from pycoll.testing import run_processes, run_threads
from without_python import without_python


def twice(comm, call):
    """Return the result of a call that is made twice, the second time without Python code."""
    call()
    with without_python(comm):
        return call()


VIEWS = {
    "every other": lambda x: x[::2, 1::3],
    "transposed": lambda x: x.T,
    "backwards": lambda x: x[::-1, ::-1],
    "repeated": lambda x: np.broadcast_to(x[0], (4, 6)),
    "a column": lambda x: x[:, 2],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_an_input_with_gaps(run, kind):
    view = VIEWS[kind]

    def rank(comm):
        x = view(np.arange(24.0).reshape(4, 6) * (comm.rank + 1))
        before = x.copy()
        out = np.empty(x.shape)
        results = [
            twice(comm, lambda: comm.all_reduce(x)),
            twice(comm, lambda: comm.all_reduce(x, out=out)),
            twice(comm, lambda: comm.all_reduce(x, async_op=True).wait()),
        ]
        assert np.array_equal(x, before)
        want = view(np.arange(24.0).reshape(4, 6) * 3)
        return [np.array_equal(result, want) for result in results]

    assert run(2, rank) == [[True] * 3] * 2


def test_an_input_with_gaps_after_one_without(run):
    def rank(comm):
        whole = np.arange(16.0).reshape(4, 4)
        comm.all_reduce(whole)
        with without_python(comm):
            return [comm.all_reduce(x).tolist() for x in (whole.T, whole, whole[::-1])]

    whole = 2 * np.arange(16.0).reshape(4, 4)
    assert run(2, rank) == [[x.tolist() for x in (whole.T, whole, whole[::-1])]] * 2


def test_one_rank_packs(run):
    """Whether an input has gaps is no business of the other ranks."""

    def rank(comm):
        whole = np.arange(16.0).reshape(4, 4)
        x = whole.T if comm.rank else whole.T.copy()
        return twice(comm, lambda: comm.all_gather(x)).tolist()

    want = np.concatenate([np.arange(16.0).reshape(4, 4).T] * 2).tolist()
    assert run(2, rank) == [want] * 2


def test_an_input_that_shares_memory_with_its_result(run):
    """It is packed first, so that the result cannot overwrite what is still to be read."""

    def rank(comm):
        whole = np.arange(16.0).reshape(4, 4)
        for _ in range(3):
            whole[:] = np.arange(16.0).reshape(4, 4)
            comm.all_reduce(whole.T, out=whole)
        return whole.tolist()

    assert run(2, rank) == [(2 * np.arange(16.0).reshape(4, 4).T).tolist()] * 2


def test_gaps_in_symmetric_and_in_registered_memory(run):
    def rank(comm):
        arrays = comm.empty((4, 4)), np.empty((64, 64)), np.empty((4, 4))
        comm.register(arrays[1])
        results = []
        for whole in (*arrays, *arrays):
            whole[:] = np.arange(whole.size, dtype=float).reshape(whole.shape)
            results.append(np.array_equal(comm.all_reduce(whole.T), 2 * whole.T))
        comm.unregister(arrays[1])
        return results

    assert run(2, rank) == [[True] * 6] * 2


def test_time_limits(run):
    def rank(comm):
        x, out = np.ones(8), np.empty(8)
        comm.all_reduce(x, out=out)
        comm.barrier()
        with without_python(comm):
            for limit in (5, 5.0, float("inf"), 1e300):
                comm.all_reduce(x, out=out, timeout=limit)
                comm.all_reduce(x, out=out, timeout=limit, async_op=True).wait()
                comm.barrier(timeout=limit)
        return out.tolist()

    assert run(2, rank) == [[2.0] * 8] * 2


@pytest.mark.parametrize(
    "limit", [0, -1, 0.0, float("nan"), "soon", 10**400, -(10**400), True, [1]]
)
def test_other_time_limits_are_looked_at(limit):
    def rank(comm):
        comm.barrier()
        with pytest.raises(ArgumentError, match="number of seconds above 0"):
            comm.barrier(timeout=limit)

    run_threads(1, rank)


@pytest.mark.parametrize("later", [False, True])
def test_a_time_limit_ends_the_call(later):
    def rank(comm):
        def reduce(x, timeout):
            result = comm.all_reduce(x, timeout=timeout, async_op=later)
            return result.wait() if later else result

        x = np.ones(8)
        for _ in range(2):
            reduce(x, 60)
        if comm.rank:
            time.sleep(2)
            with pytest.raises(CollError):
                comm.all_reduce(x)
            return 0.0
        start = time.monotonic()
        with without_python(comm), pytest.raises(CollTimeout, match=r"0\.5"):
            reduce(x, 0.5)
        return time.monotonic() - start

    took = run_processes(2, rank)
    assert 0.49 <= took[0] < 1.9


def test_methods_are_for_communicators_only():
    """The hot path lies at a fixed place in them, which other objects do not have."""

    class Sum(Communicator):
        """Of its own class: it has the place too."""

    def rank(comm):
        with pytest.raises(TypeError, match="method of communicators, and not of int"):
            Communicator.all_reduce(5, np.ones(2))
        with pytest.raises(AttributeError):  # it has no session, and was never initialised
            Communicator.__new__(Communicator).all_reduce(np.ones(2))
        mine = Sum(comm._session)
        total = mine.all_reduce(np.ones(2)) + comm.all_reduce(np.ones(2))
        comm._fast = None
        with pytest.raises(TypeError, match="not a Fastcall"):
            comm.all_reduce(np.ones(2))
        return total.tolist()

    assert run_threads(2, rank) == [[4, 4], [4, 4]]


NUMBERS = {
    "float": 1.5,
    "int": 3,
    "large int": 2**62,
    "bool": True,
    "complex": 1 + 2j,
    "float64": np.float64(1.5),
    "float32": np.float32(0.1),
    "int8": np.int8(-3),
    "uint64": np.uint64(2**63 + 5),
    "bool_": np.True_,
    "list": [1, 2],
    "mixed": [1, 2.5, np.float64(3)],
    "tuple": (1.0, 2.0),
    "bools": [True, False],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(run, name):
    """The same value of the same type as by Python code, which sees the array that NumPy makes."""
    x = NUMBERS[name]

    def rank(comm):
        op = "or" if np.asarray(x).dtype == bool else "max" if name == "large int" else "sum"
        op = "max" if name == "uint64" else op
        calls = [lambda: comm.all_reduce(x, op), lambda: comm.all_gather(x)]
        calls += [] if op == "or" else [lambda: comm.scan(x, op), lambda: comm.reduce(x, op)]
        for call in calls:
            slow = call()
            with without_python(comm):
                quick = call()
            assert type(quick) is type(slow)
            if slow is None:
                continue
            assert np.asarray(quick).dtype == np.asarray(slow).dtype
            assert np.shape(quick) == np.shape(slow)
            assert np.array_equal(quick, slow)
            single = not isinstance(x, (list, tuple)) and np.ndim(slow) == 0
            assert isinstance(slow, np.generic) == single
        total = comm.all_reduce(x, op)
        want = np.asarray(x) * (comm.world_size if op == "sum" else 1)
        return np.array_equal(total, want)

    assert run(2, rank) == [True] * 2


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (2**63, "int64 cannot hold"),
        ([1, 2**63], "int64 cannot hold"),
        ([1, "a"], "other things than numbers"),
        ([np.ones(2)], "other things than numbers"),
        ([1, [2, 3]], "no array"),
        ("text", "x is"),
    ],
)
def test_what_is_no_number_is_refused_as_before(run, x, text):
    def rank(comm):
        for good in (1, [1, 2]):  # its like is remembered
            comm.all_reduce(good)
            comm.all_reduce(good)
        with pytest.raises(ArgumentError, match=text):
            comm.all_reduce(x)
        return comm.all_reduce(1)

    assert run(2, rank) == [2, 2]


def test_a_number_of_another_type_is_a_mismatch(run):
    def rank(comm):
        comm.all_reduce(1.0)
        comm.all_reduce(1)
        with pytest.raises(MismatchError, match="dtype"):
            comm.all_reduce(1.0 if comm.rank else 1)
        return True

    assert run(2, rank) == [True] * 2
