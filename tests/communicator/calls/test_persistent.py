"""Plans that are bound to their arrays: ``comm.plan(..., persistent=True)``."""

import copy
import gc
import pickle
import weakref

import ml_dtypes
import numpy as np
import pytest

import pycoll
from pycoll.errors import ArgumentError, CommClosed, MismatchError, PeerRejected
from pycoll.testing import run_processes, run_threads

CASES = {  # what rank r of n gives
    "all_reduce": lambda r, n: np.arange(5.0) + r,
    "reduce_scatter": lambda r, n: np.arange(2.0 * n) + r,
    "all_gather": lambda r, n: np.full(3, r, np.int16),
    "all_to_all": lambda r, n: np.arange(2 * n) + 100 * r,
    "broadcast": lambda r, n: np.full(4, r, np.float32),
    "reduce": lambda r, n: np.full(4, r + 1.0),
    "gather": lambda r, n: np.full(4, r, np.uint8),
    "scan": lambda r, n: np.full(4, r + 1.0),
}


@pytest.mark.parametrize("run", [run_threads, run_processes])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_it_does_what_the_method_does(run, n):
    def rank(comm):
        for name, make in CASES.items():
            x = make(comm.rank, n)
            plan = comm.plan(name, x, persistent=True)
            for turn in range(3):
                x[...] = make(comm.rank, n) + turn
                wanted = getattr(comm, name)(x.copy())
                found = plan()
                assert (found is None) == (wanted is None), name
                assert found is None or found.tobytes() == wanted.tobytes(), (name, turn)
                assert plan.__class__.__name__ == "Persistent"
        return True

    assert all(run(n, rank))


def test_it_returns_the_same_array_every_time():
    def rank(comm):
        x, out = np.ones(3), np.empty(3)
        own = comm.plan("all_reduce", x, "max", out=out, persistent=True)
        made = comm.plan("all_reduce", x, persistent=True)
        in_place = comm.plan("all_reduce", x, out=x, persistent=True)
        assert own() is out
        assert made() is made()
        assert in_place() is x
        return [*out, *made(), *x]

    assert run_processes(2, rank) == [[1.0] * 3 + [4.0] * 3 + [2.0] * 3] * 2


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.bool_, np.complex64, np.int8])
def test_every_dtype(dtype):
    def rank(comm):
        x = (np.arange(7) % 2).astype(dtype)
        op = "max" if dtype is np.bool_ else "sum"
        plan = comm.plan("all_reduce", x, op, persistent=True)
        return plan().tobytes() == comm.all_reduce(x, op).tobytes()

    assert run_processes(3, rank) == [True] * 3


def test_arrays_in_symmetric_memory_and_strided_ones():
    def rank(comm):
        x, y = comm.empty(1 << 16, np.float32), comm.empty(1 << 16, np.float32)
        far = comm.plan("all_reduce", x, out=y, persistent=True)
        wide = np.arange(20.0)
        strided = comm.plan("all_reduce", wide[::2], persistent=True)
        for turn in range(3):
            x[:], wide[:] = turn, np.arange(20.0) + turn
            assert far() is y
            assert (y == 2 * turn).all()
            assert (strided() == 2 * wide[::2]).all()
        return True

    assert all(run_processes(2, rank))


def test_functions_lists_and_a_plan_of_another_rank():
    """What only Python code runs does the same; a plan meets the method of another rank."""

    def rank(comm):
        x = np.arange(3.0) + comm.rank
        largest = comm.plan("all_reduce", x, np.maximum, persistent=True)
        assert largest().tolist() == [1.0, 2.0, 3.0]
        plan = comm.plan("all_reduce", x, persistent=True)
        found = plan() if comm.rank else comm.all_reduce(x)
        assert found.tolist() == [1.0, 3.0, 5.0]
        return True

    assert all(run_processes(2, rank))


def test_errors_name_the_line_of_the_call():
    def rank(comm):
        x = np.ones(2 + comm.rank)
        plan = comm.plan("all_reduce", x, persistent=True)
        with pytest.raises(MismatchError, match=r"test_persistent\.py:\d+"):
            plan()
        return True

    assert all(run_processes(2, rank))


def test_arguments_are_refused_on_all_ranks():
    def rank(comm):
        plan = comm.plan("all_reduce", np.ones(2), persistent=True)
        with pytest.raises(
            TypeError if comm.rank == 0 else PeerRejected, match="takes no argument"
        ):
            plan(*([np.ones(2)] if comm.rank == 0 else []))
        with pytest.raises(ArgumentError, match="persistent=True"):
            comm.plan("all_reduce", np.ones(2), out=np.ones(2))
        with pytest.raises(ArgumentError, match="float64"):
            comm.plan("all_reduce", np.ones(2), out=np.ones(2, np.float32), persistent=True)
        return plan().tolist()

    assert run_processes(2, rank) == [[2.0, 2.0]] * 2


def test_it_cannot_be_copied_and_ends_with_its_communicator():
    def rank(comm):
        other = comm.dup()
        plan = other.plan("all_reduce", np.ones(2), persistent=True)
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="belongs to its communicator"):
                way(plan)
        other.close()
        with pytest.raises(CommClosed):
            plan()
        return True

    assert all(run_processes(2, rank))


def test_it_keeps_its_arrays_and_lets_go_of_them():
    def rank(comm):
        class Array(np.ndarray):
            pass

        x = np.ones(1000).view(Array)
        plan = comm.plan("all_reduce", x, persistent=True)
        seen = weakref.ref(x)
        del x
        gc.collect()
        assert plan().sum() == 2000
        kept = seen() is not None
        del plan
        gc.collect()
        return kept and seen() is None

    assert run_processes(2, rank) == [True, True]


def test_a_world_of_one():
    with pycoll.init() as comm:
        assert comm.plan("all_reduce", np.ones(2), persistent=True)().tolist() == [1.0, 1.0]
