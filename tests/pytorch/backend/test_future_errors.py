"""Errors of futures have the types of the errors of calls."""

import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from pycoll.torch import BackendArgumentError, BackendTimeout  # noqa: E402
from pycoll.torch.errors import from_text  # noqa: E402
from worlds_torch import run_group  # noqa: E402


def raised(call):
    with pytest.raises(RuntimeError) as told:
        call()
    return told.value


def test_a_timeout_keeps_its_type():
    def body(rank, n):
        group = dist.new_group(range(n))
        if rank == 0:
            group.set_timeout(timedelta(seconds=0.3))
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            future = work.get_future()
            later = future.then(lambda done: done.value()[0] + 1)
            seen = []
            after = future.then(lambda done: seen.append(raised(done.value)))
            errors = [raised(f.wait) for f in (future, later)] + [raised(future.value)]
            after.wait()
            assert [type(e) for e in errors + seen] == [BackendTimeout] * 4
            for error in errors + seen:
                assert str(error).startswith("all_reduce on rank 0 of 2 in group")
                assert "rank 1: has not made this call" in str(error)
                assert "At:" not in str(error)
            assert type(work.exception()) is BackendTimeout
        dist.barrier()

    run_group(2, body)


def test_a_refused_argument_and_a_lost_peer():
    def body(rank, n):
        x = torch.ones(3 if rank else 4)
        error = raised(dist.all_reduce(x, async_op=True).get_future().wait)
        return type(error) is dist.DistBackendError, "MismatchError" in str(error)

    assert run_group(2, body) == [(True, True)] * 2


def test_errors_of_others_stay_as_they_are():
    future = torch.futures.Future()
    failed = future.then(lambda done: 1 / 0)
    future.set_result(1)
    error = raised(failed.wait)
    assert type(error) is RuntimeError
    assert "ZeroDivisionError" in str(error)


def test_the_text_of_an_error():
    why = "all_reduce on rank 0 of 2 in group '0': ArgumentError: no\n  more"
    told = from_text(f"Got the following error: BackendArgumentError: {why}\n\nAt:\n  f(1)\n")
    assert (type(told), str(told)) == (BackendArgumentError, why)
    assert from_text("BackendTimeout") is None


def test_a_wait_that_is_too_short_says_who_waits_for_whom():
    def body(rank, n):
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            with pytest.raises(BackendTimeout) as told:
                work.wait(timedelta(seconds=0.3))
            dist.barrier(group=dist.group.WORLD, async_op=True)
            return str(told.value)
        time.sleep(1.0)
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        return ""

    text = run_group(2, body)[0]
    assert "it still runs meanwhile" in text
    assert "rank 0: is in all_reduce(float32[3]" in text
    assert "waits for rank 1 to make this call" in text
    assert "rank 1: has made no call so far" in text


def test_the_debugging_mode_of_pytorch(monkeypatch):
    """It wraps backends in C++, and leaves groups in Python as they are."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

    def body(rank, n):
        dist.set_debug_level_from_env()
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
        group = dist.new_group(range(n))
        x = torch.full((5,), float(rank))
        dist.all_reduce(x, group=group)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
        net(torch.ones(2, 3)).sum().backward()
        error = raised(lambda: dist.all_reduce(torch.ones(3 + rank), group=group))
        return x.tolist(), "MismatchError" in str(error)

    assert run_group(2, body) == [([1.0] * 5, True)] * 2
