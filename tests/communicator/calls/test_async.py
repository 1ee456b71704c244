"""Calls in the background, and calls prepared once."""

import gc
import inspect
import time

import numpy as np
import pytest

from pycoll.errors import ArgumentError, CollTimeout, CommClosed, MismatchError
from pycoll.testing import run_processes


def values(comm, n=1000):
    return np.full(n, comm.rank + 1.0)


def test_wait_returns_the_result(run):
    def rank(comm):
        x = values(comm)
        work = comm.all_reduce(x, async_op=True)
        first, second = work.wait(), work.wait()
        assert first is second
        assert work.done()
        out = np.empty_like(x)
        assert comm.all_reduce(x, out=out, async_op=True).wait() is out
        return first.tolist() == out.tolist() == [6.0] * len(x)

    assert run(3, rank) == [True] * 3


def test_every_collective_in_the_background(run):
    def rank(comm):
        me, n = comm.rank, comm.world_size
        x = np.arange(2 * n) + me
        works = [
            comm.all_reduce(x, async_op=True),
            comm.reduce_scatter(x, async_op=True),
            comm.reduce(x, root=1, async_op=True),
            comm.all_gather(x[:1], async_op=True),
            comm.broadcast(x.copy(), root=1, async_op=True),
            comm.gather(x[:1], root=1, async_op=True),
            comm.scatter(x, root=1, async_op=True),
            comm.all_to_all(x, async_op=True),
            comm.barrier(async_op=True),
        ]
        return [None if r is None else r.tolist() for r in (w.wait() for w in works)]

    total = [1, 3, 5, 7]
    assert run(2, rank) == [
        [total, total[:2], None, [0, 1], [1, 2, 3, 4], None, [1, 2], [0, 1, 1, 2], None],
        [total, total[2:], total, [0, 1], [1, 2, 3, 4], [0, 1], [3, 4], [2, 3, 3, 4], None],
    ]


@pytest.mark.parametrize("n", [1, 10_000, 300_000])
def test_a_call_goes_on_while_its_thread_does_something_else(run, n):
    """Nobody waits for it before the others have its result, whether or not the helper sleeps."""

    def rank(comm):
        x, said = values(comm, n), np.zeros(1)
        for pause_s in (0, 0, 0.001, 0.05):
            time.sleep(pause_s)
            if comm.rank == 0:
                work = comm.all_reduce(x, async_op=True)
                comm.recv(said, src=1, timeout=20)
                assert work.wait()[0] == 3
            else:
                said[0] = comm.all_reduce(x, timeout=20)[0]
                comm.send(said, dst=0)
        return said[0]

    assert run(2, rank) == [3, 3]


def test_a_queue_runs_in_order_and_before_blocking_calls(run):
    def rank(comm):
        x = np.ones(3)
        works = [comm.all_reduce(x, out=x, async_op=True) for _ in range(10)]
        comm.all_reduce(x, out=x)
        assert all(work.done() for work in works)
        return x.tolist()

    assert run(2, rank) == [[2.0**11] * 3] * 2


def test_it_proceeds_while_python_does_something_else(run):
    def rank(comm):
        x = values(comm, 50_000)
        if comm.rank == 0:
            work = comm.all_reduce(x, async_op=True)
            until = time.monotonic() + 5
            while not work.done() and time.monotonic() < until:
                time.sleep(0.005)
            return work.done() and work.wait()[0] == 3.0
        time.sleep(0.1)
        return comm.all_reduce(x)[0] == 3.0

    assert run(2, rank) == [True, True]


def test_a_wait_that_is_too_short_can_be_repeated(run):
    def rank(comm):
        if comm.rank == 1:
            time.sleep(0.5)
        work = comm.all_reduce(values(comm), async_op=True)
        if comm.rank == 0:
            assert not work.done()
            with pytest.raises(CollTimeout):
                work.wait(timeout=0.05)
        return work.wait()[0]

    assert run(2, rank) == [3.0, 3.0]


def test_arrays_outlive_the_callers_references(run):
    def rank(comm):
        if comm.rank == 1:
            time.sleep(0.1)
        works = [comm.all_reduce(np.full(9999, i), async_op=True) for i in range(20)]
        gc.collect()
        return all((w.wait() == 2 * i).all() for i, w in enumerate(works))

    assert run(2, rank) == [True, True]


def test_works_that_nobody_waits_for(run):
    def rank(comm):
        for i in range(50):
            comm.all_reduce(np.full(3333, i), async_op=True)
        comm.broadcast(np.empty(100_000), async_op=True)
        return comm.all_reduce(np.ones(2)).tolist()

    assert run(2, rank) == [[2.0, 2.0]] * 2


def test_close_finishes_the_queue(run):
    def rank(comm):
        out = np.zeros(5000)
        if comm.rank == 1:
            time.sleep(0.1)
        work = comm.all_reduce(values(comm, 5000), out=out, async_op=True)
        comm.close()
        return work.done() and work.wait() is out and out[0] == 3.0

    assert run(2, rank) == [True, True]


def test_an_error_is_raised_by_wait(run):
    def rank(comm):
        work = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
        for _ in range(2):
            with pytest.raises(MismatchError, match="count"):
                work.wait()
        return work.done()

    assert run(2, rank) == [True, True]


def test_bad_arguments_are_refused_at_once(run):
    def rank(comm):
        with pytest.raises(ArgumentError):
            comm.all_reduce(np.ones(3), op="mean", async_op=True)
        return comm.all_reduce(np.ones(1), async_op=True).wait()[0]

    assert run(2, rank) == [2.0, 2.0]


def test_a_timeout_of_the_call_itself():
    def rank(comm):
        if comm.rank == 0:
            work = comm.all_reduce(np.ones(3), timeout=0.2, async_op=True)
            with pytest.raises(CollTimeout):
                work.wait()
        else:
            time.sleep(0.5)
        return True

    assert run_processes(2, rank) == [True, True]


def test_a_plan_is_made_once_and_called_often(run):
    def rank(comm):
        x = values(comm, 64)
        plan = comm.plan("all_reduce", like=x, op="max")
        fresh, out = plan(x), np.empty_like(x)
        assert plan(x, out=out) is out
        assert plan(x, out=x, async_op=True).wait() is x
        return [fresh[0], out[0], x[0]]

    assert run(3, rank) == [[3.0, 3.0, 3.0]] * 3


def test_a_plan_for_a_root_and_an_algorithm(run):
    def rank(comm):
        x = values(comm, 8)
        broadcast = comm.plan("broadcast", like=x, root=1, algorithm="direct")
        ring = comm.plan("all_reduce", like=x, algorithm="ring", order="any")
        return broadcast(x.copy())[0], ring(x)[0]

    assert run(2, rank) == [(2.0, 3.0)] * 2


@pytest.mark.parametrize("wrong", [np.ones(7), np.ones((8, 1)), np.ones(8, np.float32)], ids=repr)
def test_a_plan_refuses_another_array(run, wrong):
    def rank(comm):
        plan = comm.plan("all_reduce", like=np.ones(8))
        with pytest.raises(ArgumentError, match=r"this plan was made for float64\[8\]"):
            plan(wrong)
        return plan(np.ones(8))[0]

    assert run(2, rank) == [2.0, 2.0]


def test_a_plan_for_no_numpy_array_refuses_another_type(run):
    def rank(comm):
        plan = comm.plan("all_reduce", like=memoryview(np.ones(8, np.float32)))
        with pytest.raises(ArgumentError, match=r"this plan was made for float32\[8\]"):
            plan(np.ones(8))
        return plan(np.ones(8, np.float32))[0]

    assert run(2, rank) == [2.0, 2.0]


@pytest.mark.parametrize(
    "name", ["barrier", "all_gather_v", "refused", "all_reduec", "ALL_REDUCE", 5, None, []]
)
def test_what_cannot_be_planned(run, name):
    def rank(comm):
        with pytest.raises(
            ArgumentError, match=r"collective=.* accepted: all_reduce, .*all_to_all"
        ):
            comm.plan(name, like=np.ones(8))
        return comm.all_reduce(np.ones(1))[0]

    assert run(2, rank) == [2.0, 2.0]


def test_a_plan_after_close(run):
    def rank(comm):
        comm.barrier()
        comm.close()
        with pytest.raises(CommClosed, match="has been closed"):
            comm.plan("all_reduce", like=np.ones(8))
        return True

    assert run(2, rank) == [True, True]


def test_errors_of_plans_name_the_line_that_has_made_the_call():
    def rank(comm):
        plan = comm.plan("all_reduce", np.ones(2))
        plan(np.ones(2))
        plan(np.ones(2))
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(np.ones(3)) if comm.rank else plan(np.ones(2))
        return str(caught.value)

    line = inspect.getsourcelines(rank)[1] + 5
    for text in run_processes(2, rank):
        assert text.count(f"test_async.py:{line} ") == 2


def test_a_plan_takes_symmetric_and_private_arrays_in_turn(run):
    def rank(comm):
        plan = comm.plan("all_reduce", np.ones(4))
        far = comm.empty(4, np.float64)
        found = []
        for x in (np.ones(4), far, np.ones(8)[::2], far, np.ones(4)):
            x[...] = 1
            found.append(plan(x)[0])
        return found

    assert run(2, rank) == [[2.0] * 5] * 2
