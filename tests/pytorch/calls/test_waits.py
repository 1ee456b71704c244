"""Limits of waits, and whoever else may wait for a call: `wait_tensor`, a future, a child."""

import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from torch._C._distributed_c10d import WorkResult  # noqa: E402

import pycoll.torch  # noqa: E402
from pycoll.torch.calls.background import Background  # noqa: E402
from worlds_torch import run_group  # noqa: E402


def test_the_longest_limit():
    def body(rank, n):
        hold = threading.Event()
        dist.group.WORLD._caller.background.submit(hold.wait, [])
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        threading.Timer(0.1, hold.set).start()
        assert work.wait(timedelta.max)
        receive = dist.irecv(torch.empty(3), 1 - rank)
        dist.send(x, 1 - rank)
        assert receive.wait(timedelta.max)

    run_group(2, body)


def test_a_limit_beside_a_future():
    def body(rank, n):
        x = torch.zeros(3)
        if rank == 0:
            work = dist.irecv(x, 1)
            future = work.get_future()
            time.sleep(0.1)
            start = time.monotonic()
            with pytest.raises(pycoll.torch.BackendTimeout, match="still under way"):
                work.wait(timedelta(seconds=0.2))
            assert not work.is_completed()
            assert time.monotonic() - start < 5
        dist.barrier()
        if rank == 1:
            dist.send(x + 1, 0)
        else:
            assert (future.wait()[0] == 1).all()
            assert work.wait()

    run_group(2, body)


def test_a_message_that_comes_after_its_future_has_failed():
    def body(rank, n):
        x = torch.zeros(3)
        if rank == 0:
            work = dist.irecv(x, 1)
            dist.group.WORLD._caller.timeout_s = 0.2
            with pytest.raises(pycoll.torch.BackendTimeout, match="from rank 1"):
                work.get_future().wait()
            assert work.get_future_result().wait() == int(WorkResult.TIMEOUT)
            assert not work.is_completed()
        dist.group.WORLD._caller.timeout_s = 15.0
        dist.barrier()
        if rank == 1:
            dist.send(x + 1, 0)
        else:
            assert work.wait()
            assert (x == 1).all()

    run_group(2, body)


@pytest.mark.skipif(
    not hasattr(functional, "allow_inflight_collective_as_graph_input_ctx"),
    reason="this PyTorch has no such inputs",
)
def test_a_call_in_flight_as_an_input_of_a_graph():
    def body(rank, n):
        x = torch.ones(4)
        if rank == 1:
            time.sleep(0.3)
        with functional.allow_inflight_collective_as_graph_input_ctx():
            work = dist.all_reduce(x, async_op=True)
            y = torch.ops._c10d_functional.wait_tensor(x)
        assert y.tolist() == [n] * 4
        work.wait()

    run_group(2, body)


def in_child(function):
    """Run a function in a forked child that has five seconds; return what became of it."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        try:
            function()
        except BaseException:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_leaves_while_a_thread_of_the_parent_is_in_a_call():
    def body(rank, n):
        x = torch.ones(3)
        pending = []

        def waits_for_call():
            for ask in (
                pending[0].wait,
                lambda: pending[0].wait(timedelta(seconds=1)),
                pending[0].get_future,
                pending[0].result,
            ):
                with pytest.raises(dist.DistBackendError, match="ForkedError"):
                    ask()

        def waits_for_message():
            with pytest.raises(dist.DistBackendError, match="ForkedError"):
                pending[1].wait(timedelta(seconds=1))

        if rank == 0:
            pending.append(dist.all_reduce(x, async_op=True))
            pending.append(dist.irecv(torch.empty(3), 1))
            pending[1].get_future()
            time.sleep(0.2)  # both threads wait
            assert in_child(waits_for_call) == 0
            assert in_child(waits_for_message) == 0
            assert in_child(dist.destroy_process_group) == 0
        else:
            time.sleep(1.0)
            dist.send(x, 0)
            dist.all_reduce(x)
        for work in pending:
            work.wait()
        dist.all_reduce(x)

    run_group(2, body)


def test_a_thread_that_cannot_be_started(monkeypatch):
    """A future is completed all the same, and the next call tries again."""
    background, real = Background("test"), threading.Thread.start

    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="new thread"):
        background.submit(lambda: None, [])
    assert not background.busy
    monkeypatch.setattr(threading.Thread, "start", real)
    hold = threading.Event()
    future = background.submit(hold.wait, []).get_future()
    monkeypatch.setattr(threading.Thread, "start", refused)
    hold.set()
    until = time.monotonic() + 5
    while not future.done():
        assert time.monotonic() < until, "the future was not completed"
        time.sleep(0.001)
    monkeypatch.setattr(threading.Thread, "start", real)
    background.submit(lambda: None, []).wait()
    background.stop()


def test_a_destroyed_group_ends_without_the_collector():
    """Its memory is mapped for as long as its session is there."""

    def body(rank, n):
        gc.disable()
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
        session = weakref.ref(group._caller.session)
        dist.destroy_process_group(group)
        del group
        assert session() is None
        gc.enable()

    run_group(2, body)


def test_hidden_tensors_do_not_follow_the_default_device():
    def body(rank, n):
        torch.set_default_device("meta")
        empty = dist.group.WORLD.allocate_tensor(0, dtype=torch.float32)
        assert empty.device.type == "cpu"

    run_group(2, body)


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_memory_that_cannot_be_had_is_an_error_on_every_rank(kind, monkeypatch):
    def body(rank, n):
        def none(*_):
            raise kind("cannot allocate memory")

        whole = torch.zeros(n)
        if rank == 0:
            monkeypatch.setattr("pycoll.torch.calls.prepare.apart", none)
        expected = kind if rank == 0 else dist.DistBackendError
        with pytest.raises(expected, match="cannot allocate memory"):
            dist.all_gather_into_tensor(whole, torch.ones(1))
        monkeypatch.undo()
        dist.all_gather_into_tensor(whole, torch.ones(1))
        assert (whole == 1).all()

    run_group(2, body)


LAYOUTS = {
    "contiguous": lambda: torch.ones(1000),
    "strided": lambda: torch.ones(2000)[::2],
    "transposed": lambda: torch.ones(20, 50).t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_on_one_tensor_have_the_order_in_which_they_were_made(layout):
    """Whatever has to be copied on the way: a call finds what the one before it has written."""

    def body(rank, n):
        x = LAYOUTS[layout]()
        works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        assert (x == 2.0**5).all()
        works += [dist.all_reduce(x, async_op=True)]
        out, blocks = torch.empty(x.numel()), [torch.empty(x.numel()) for _ in range(n)]
        works += [dist.reduce_scatter(out, [x] * n, async_op=True)]
        works += [dist.all_to_all(blocks, [x] * n, async_op=True)]
        for work in works:
            work.wait()
        assert (out == 2.0**7).all()
        assert all((block == 2.0**6).all() for block in blocks)

    run_group(2, body)


def test_calls_of_a_group_of_one_rank_have_their_order():
    """Where lists have one tensor each, too."""

    def body(rank, n):
        x, *outs = (torch.zeros(5) for _ in range(4))
        with dist.group.WORLD._caller.lock:  # nothing has run when the last call is made
            works = [dist.all_gather_into_tensor(x, torch.ones(5), async_op=True)]
            works += [dist.all_to_all([outs[0]], [x], async_op=True)]
            works += [dist.all_gather([outs[1]], x, async_op=True)]
            works += [dist.reduce_scatter(outs[2], [x], async_op=True)]
        for work in works:
            work.wait()
        return [out.tolist() for out in outs]

    assert run_group(1, body) == [[[1.0] * 5] * 3]


def test_lists_that_the_program_changes_after_the_call():
    """PyTorch's own groups have read them when an asynchronous call returns."""

    def body(rank, n):
        bucket, outs = [torch.ones(3), torch.ones(2)], [torch.zeros(3) for _ in range(n)]
        held, rows = [*bucket, *outs], [[t] for t in outs]
        options = dist.AllreduceCoalescedOptions()
        options.asyncOp = True
        with dist.group.WORLD._caller.lock:
            works = [dist.all_gather(outs, torch.full((3,), 5.0), async_op=True)]
            works += [dist.group.WORLD.allreduce_coalesced(bucket, options)]
            works += [dist.group.WORLD.allgather_coalesced(rows, [bucket[0]])]
            outs.clear()
            bucket.clear()
            rows[0].clear()
        for work in works:
            work.wait()
        return [t.tolist() for t in held]

    assert run_group(2, body) == [[[2.0] * 3, [2.0] * 2, *[[2.0] * 3] * 2]] * 2
