"""Calls on registered arrays, like earlier ones: without Python code, and as safe as the first."""

import threading
import time
from functools import partial

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.testing import run_processes
from without_python import without_python

SMALL, LARGE = 96, 30_000  # staged, and done where the arrays lie


def registered(comm, count, offset):
    """Return an array that begins `offset` elements behind a page, and what surrounds it."""
    whole = np.full(count + 3 * 1024, -1.0, np.float32)
    first = -(-whole.ctypes.data // 4096) * 4096 - whole.ctypes.data
    array = whole[first // 4 + offset :][:count]
    comm.register(array)
    return array, whole


def calls_of(comm, x, out):
    """Return calls by name, with what each must give in its last array."""
    n, rank, count = comm.world_size, comm.rank, x.size
    block = count // n
    inputs = [np.arange(count, dtype=np.float32) + r for r in range(n)]
    total, mine = sum(inputs), slice(rank * block, (rank + 1) * block)
    blocks = [inputs[r][:block] for r in range(n)]
    exchanged = [inputs[r][mine] for r in range(n)]
    return {
        "all_reduce": (lambda: comm.all_reduce(x, out=out), total),
        "all_reduce, a new result": (lambda: comm.all_reduce(x), total),
        "all_reduce, in place": (lambda: comm.all_reduce(x, out=x), total),
        "broadcast": (lambda: comm.broadcast(x, n - 1), inputs[n - 1]),
        "reduce": (lambda: comm.reduce(x, root=0, out=out if rank == 0 else None), total),
        "all_gather": (lambda: comm.all_gather(x[:block], out=out), np.concatenate(blocks)),
        "all_gather, in place": (
            lambda: comm.all_gather(x[mine], out=x),
            np.concatenate([inputs[r][r * block : (r + 1) * block] for r in range(n)]),
        ),
        "reduce_scatter": (lambda: comm.reduce_scatter(x, out=out[:block]), total[mine]),
        "reduce_scatter, in place": (lambda: comm.reduce_scatter(x, out=x[mine]), total[mine]),
        "all_to_all": (lambda: comm.all_to_all(x, out=out), np.concatenate(exchanged)),
        "gather": (lambda: comm.gather(x[:block], 0), np.concatenate(blocks)),
    }


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("which", ["x", "out", "both"])
def test_the_second_call_needs_no_python_code(n, count, which):
    def rank(comm):
        (x, around), (out, beside) = (registered(comm, 6 * LARGE + 8, odd) for odd in (0, 17))
        if which == "x":
            comm.unregister(out)
        if which == "out":
            comm.unregister(x)
        odd = 5
        x, out = x[odd : odd + 6 * count], out[odd : odd + 6 * count]
        before = around.copy(), beside.copy()
        for name, (call, expected) in calls_of(comm, x, out).items():
            x[:] = np.arange(x.size, dtype=np.float32) + comm.rank
            call()
            for k in range(3):
                x[:] = np.arange(x.size, dtype=np.float32) + comm.rank
                out[:] = k
                if which == "both" or not (name == "reduce" and count == LARGE):
                    with without_python(comm):
                        result = call()
                else:  # the result needs symmetric memory of its own
                    result = call()
                if result is not None:
                    np.testing.assert_array_equal(result, expected, f"{name}, {k}")
        x[:], out[:] = -1, -1
        return np.array_equal(around, before[0]) and np.array_equal(beside, before[1])

    assert run_processes(n, rank) == [True] * n


def test_a_rank_that_registers_and_others_that_use_symmetric_memory():
    """They mean the same by it."""

    def rank(comm):
        x = comm.empty(LARGE, np.float32)
        if comm.rank == 1:
            x, _ = registered(comm, LARGE, 9)
        results = []
        for k in range(4):
            x[:] = comm.rank + k
            results.append(comm.all_reduce(x, out=x).copy())
        return [r.tolist() == [3 + 3 * k] * LARGE for k, r in enumerate(results)]

    assert run_processes(3, rank) == [[True] * 4] * 3


def test_calls_after_an_array_has_moved_back_and_in_again():
    def rank(comm):
        x, _ = registered(comm, LARGE, 3)
        results = []
        for k in range(6):
            if k % 2 == 0:
                comm.all_reduce(x, out=x)
            else:
                comm.unregister(x)
                comm.all_reduce(x, out=x)
                comm.register(x)
            x[:] = comm.rank + k
            comm.all_reduce(x, out=x)
            results.append((x == 2 * k + 1).all())
        del x
        return results

    assert run_processes(2, rank) == [[True] * 6] * 2


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("which", ["x", "out", "both"])
def test_an_array_that_such_a_call_uses_stays_where_it_is(which, persistent):
    def rank(comm):
        x, out = np.ones(1 << 16), np.empty(1 << 16)
        mine = out if which == "out" else x
        if which == "both":
            out = x
        run = partial(comm.all_reduce, x, out=out)
        if persistent:  # bound to ordinary arrays
            run = comm.plan("all_reduce", x, out=out, persistent=True)
        comm.register(mine)
        run()
        x[:] = 1
        if comm.rank == 1:
            comm.recv(np.empty(1), 0)
            return run().max()
        failed = []

        def call():
            try:
                with without_python(comm):
                    run()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        registration = comm._session.memory._registered[mine.ctypes.data][1]
        deadline = time.monotonic() + 10
        while not registration.is_held:
            assert not failed
            assert time.monotonic() < deadline
        with pytest.raises(ArgumentError, match="in use by a call of another thread"):
            comm.unregister(mine)
        comm.send(np.ones(1), 1)
        thread.join()
        assert not failed
        comm.unregister(mine)
        return out.max()

    assert run_processes(2, rank) == [2, 2]


def test_memory_that_others_have_by_now():
    """An array that was registered is freed; another one has its addresses, and is ordinary."""

    def rank(comm):
        results = []
        for k in range(20):
            x = np.full(LARGE, comm.rank + k, np.float32)
            if k % 2 == 0:
                comm.register(x)
            for _ in range(2):
                results.append((comm.all_reduce(x) == 2 * k + 1).all())
            del x
        return all(results), len(comm._session.memory._registered)

    assert run_processes(2, rank) == [(True, 0)] * 2


def test_an_array_that_is_unregistered_just_when_a_call_has_ended():
    """The call is not remembered for ordinary arrays: peers could not reach those."""

    def rank(comm):
        x, _ = registered(comm, LARGE, 3)
        start = comm._session.start

        def and_unregister(*given):  # stands for another thread
            result = start(*given)
            if comm.rank == 0:
                comm.unregister(x)
            return result

        x[:] = 1
        comm._session.start = and_unregister
        comm.all_reduce(x, out=x)
        del comm._session.start
        ordinary = np.ones(LARGE, np.float32)
        return x.max(), comm.all_reduce(ordinary, out=ordinary).max()

    assert run_processes(2, rank) == [(2, 2)] * 2
