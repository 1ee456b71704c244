"""Ranks that die, differ or are missing: every other rank raises soon, and says who and what."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import WorkResult  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import pycoll.torch  # noqa: E402
from faults import BOUND_S, Event  # noqa: E402
from torch_clients.models import mlp, train  # noqa: E402
from worlds_torch import run_group  # noqa: E402

X = torch.ones(100)


def _uneven(rank):
    splits = [4, 0, 0] if rank == 0 else [0, 2, 2]
    dist.all_to_all_single(torch.ones(4), torch.ones(4), splits, splits)


WAITS = {
    "all_reduce": lambda rank: dist.all_reduce(X),
    "all_reduce in the background": lambda rank: dist.all_reduce(X, async_op=True).wait(),
    "future": lambda rank: dist.all_reduce(X, async_op=True).get_future().wait(),
    "broadcast": lambda rank: dist.broadcast(X, 1),
    "all_gather": lambda rank: dist.all_gather([torch.ones(3) for _ in range(3)], torch.ones(3)),
    "reduce_scatter": lambda rank: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(3)),
    "all_to_all": _uneven,
    "barrier": lambda rank: dist.barrier(),
    "recv": lambda rank: dist.recv(torch.ones(3), 1),
    "recv from any rank": lambda rank: dist.recv(torch.ones(3)),
    "irecv": lambda rank: dist.irecv(torch.ones(3), 1).wait(),
    "large send": lambda rank: dist.send(torch.ones(10**6), 1),
    "objects": lambda rank: dist.all_gather_object([None] * 3, "x"),
}


def expect(wait, rank, event, match):
    """Wait for an error that comes soon after the event; return its type and text."""
    with pytest.raises(RuntimeError, match=match) as caught:
        wait(rank)
    assert event.age() < BOUND_S
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(X)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_rank(wait):
    event = Event()

    def body(rank, n):
        dist.all_reduce(X)
        if rank == 1:
            time.sleep(0.2)
            event.happens()
            os.kill(os.getpid(), signal.SIGKILL)
        return expect(WAITS[wait], rank, event, r"rank 1 \(process \d+\) died")

    first, code, third = run_group(3, body, may_die=[1])
    assert code == -signal.SIGKILL
    for rank, (kind, text) in ((0, first), (2, third)):
        assert f"on rank {rank} of 3 in group" in text
        if wait != "future":  # C++ between has made a RuntimeError of it
            assert kind == "DistBackendError"
        assert "its last call was all_reduce(float32[100]" in text
        assert "test_failures.py:" in text


def test_a_killed_rank_of_data_parallel_training():
    event = Event()

    def body(rank, n):
        model = DistributedDataParallel(mlp())
        train(model, rank, steps=2)
        if rank == 1:
            time.sleep(0.2)
            event.happens()
            os.kill(os.getpid(), signal.SIGKILL)
        match = r"all_reduce on rank(.|\n)*rank 1 \(process \d+\) died"
        return expect(lambda _: train(model, rank), rank, event, match)

    assert run_group(3, body, may_die=[1])[1] == -signal.SIGKILL


MISMATCHES = {
    "operation": (lambda: dist.all_reduce(X), lambda: dist.broadcast(X, 0), "kind"),
    "size": (lambda: dist.all_reduce(X), lambda: dist.all_reduce(X[:7]), "count"),
    "type": (lambda: dist.all_reduce(X), lambda: dist.all_reduce(X.double()), "dtype"),
    "reduction": (lambda: dist.all_reduce(X), lambda: dist.all_reduce(X, dist.ReduceOp.MAX), "op"),
    "root": (lambda: dist.broadcast(X, 0), lambda: dist.broadcast(X, 1), "root"),
}


@pytest.mark.parametrize("case", MISMATCHES)
@pytest.mark.parametrize("background", [False, True])
def test_a_call_that_does_not_match(case, background):
    usual, odd, field = MISMATCHES[case]
    event = Event()

    def body(rank, n):
        dist.barrier()
        if rank == 2:
            event.happens()

        def call(rank):
            if background:
                dist.barrier(async_op=True)  # makes the next call go to the thread
            (odd if rank == 2 else usual)()

        return expect(call, rank, event, "MismatchError")[1]

    for text in run_group(3, body):
        assert f"field '{field}' differs" in text
        if "has not made this call yet" not in text:  # a rank may be late on a busy machine
            assert "rank 2 differs from the others" in text
        assert text.count("test_failures.py:") >= 2


def test_a_rank_that_does_not_call():
    def body(rank, n):
        if rank == 1:
            time.sleep(1.5)
            return None
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="gave up after waiting") as caught:
            dist.all_reduce(X)
        assert time.monotonic() - start < 0.5 + BOUND_S
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, pycoll.torch.BackendTimeout)
        return str(caught.value)

    results = run_group(3, body, limit_s=0.5)
    for text in (results[0], results[2]):
        assert "all_reduce on rank" in text
        assert "rank 1: has not made this call" in text


def test_a_rank_that_does_not_join(tmp_path):
    def body(rank, n):
        def join(name):
            store = dist.FileStore(str(tmp_path / name), n)
            start = time.monotonic()
            limit = timedelta(seconds=0.5)
            place = {"store": store, "rank": rank, "world_size": n, "timeout": limit}
            with pytest.raises(pycoll.torch.BackendTimeout) as caught:
                dist.init_process_group("pycoll", **place)
            assert time.monotonic() - start < 0.5 + BOUND_S
            return str(caught.value)

        dist.destroy_process_group()
        return None if rank == 1 else join("store")

    results = run_group(3, body)
    for text in (results[0], results[2]):
        assert "rank 1 of 3 to join" in text


def test_a_rank_that_leaves():
    event = Event()

    def body(rank, n):
        dist.barrier()
        if rank == 1:
            event.happens()
            dist.destroy_process_group()
            with pytest.raises(ValueError, match="initialized"):
                dist.all_reduce(X)
            return None
        return expect(lambda _: dist.all_reduce(X), rank, event, "rank 1(.|\n)*closed")[0]

    assert run_group(3, body) == ["DistBackendError", None, "DistBackendError"]


def test_a_group_that_is_aborted():
    def body(rank, n):
        group = dist.group.WORLD
        dist.barrier()
        if rank == 0:
            time.sleep(0.1)
            group.abort()
        with pytest.raises(dist.DistBackendError, match=r"Revoked|CommClosed"):
            dist.all_reduce(X)
        group.shutdown()
        with pytest.raises(dist.DistBackendError, match="CommClosed"):
            dist.all_reduce(X, async_op=True)
        with pytest.raises(dist.DistBackendError, match="CommClosed"):
            dist.send(X, 1 - rank)

    run_group(2, body)


def test_a_work_that_takes_longer_than_one_waits():
    def body(rank, n):
        if rank == 1:
            time.sleep(0.5)
        work = dist.all_reduce(x := torch.ones(3), async_op=True)
        if rank == 0:
            with pytest.raises(pycoll.torch.BackendTimeout, match="still runs"):
                work.wait(timedelta(seconds=0.05))
        work.wait()
        assert (x == n).all()

    run_group(2, body)


def test_what_a_future_tells():
    """Its errors are text, because C++ is between; the work has the error itself."""

    def body(rank, n):
        odd = dist.all_reduce(X[: rank + 1], group=dist.new_group(), async_op=True)
        assert odd.get_future_result().wait() == WorkResult.COMM_ERROR.value
        if rank == 1:
            time.sleep(1)
            return
        work = dist.all_reduce(X, async_op=True)
        future = work.get_future()
        for look in (future.wait, future.value, future.then(lambda f: f.value()).wait):
            with pytest.raises(pycoll.torch.BackendTimeout, match=r"^all_reduce on(.|\n)*gave up"):
                look()
        assert isinstance(work.exception(), pycoll.torch.BackendTimeout)
        assert work.get_future_result().wait() == WorkResult.TIMEOUT.value

    run_group(2, body, limit_s=0.3)


def test_a_child_of_a_rank():
    """A process forked by a rank, such as a loader of data, is not the rank."""

    def body(rank, n):
        dist.all_reduce(X)
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.raises(dist.DistBackendError, match="ForkedError"):
                    dist.all_reduce(X)
                with pytest.raises(dist.DistBackendError, match="ForkedError"):
                    dist.all_reduce(X, async_op=True)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        x = torch.ones(2)
        dist.all_reduce(x)
        assert (x == n).all()
        assert mlp() is not None

    run_group(2, body)


PROGRAM = """
import sys
import torch, torch.distributed as dist
import pycoll.torch

rank = int(sys.argv[1])
dist.init_process_group("pycoll", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    raise KeyError("lost key")
dist.all_reduce(torch.ones(3))
"""


def test_a_program_that_raises(tmp_path):
    """Its peers hear why, before the launcher ends them."""
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "rank 1 (process" in texts[0]
    assert "left: KeyError: 'lost key'" in texts[0]


def test_a_group_that_is_destroyed_by_an_exception_waits_for_nobody():
    """As in ``finally``; a peer that waits for a message hears of the exception at once."""

    def body(rank, n):
        dist.all_reduce(torch.ones(3))
        start, told = time.monotonic(), ""
        try:
            if rank == 0:
                work = dist.all_reduce(torch.ones(3), async_op=True)
                time.sleep(0.2)
                raise ValueError("a bad batch")
            dist.recv(torch.zeros(3), 0)
        except ValueError:
            dist.destroy_process_group()
            with pytest.raises(dist.DistBackendError):
                work.wait()
        except dist.DistBackendError as error:
            told = str(error)
        return told, time.monotonic() - start < 8

    (_, soon), (told, heard) = run_group(2, body)
    assert soon
    assert heard
    assert "ValueError: a bad batch" in told


def test_an_error_of_a_part_of_the_ranks_says_which_these_are():
    def body(rank, n):
        group = dist.new_group([1, 2])
        if rank == 0:
            return True
        with pytest.raises(dist.DistBackendError, match="field 'count' differs") as error:
            dist.all_reduce(torch.ones(rank), group=group)
        return f"on rank {rank - 1} of 2 in group" in str(error.value) and (
            "(its ranks are 1, 2 of the job)" in str(error.value)
        )

    assert run_group(3, body) == [True] * 3
