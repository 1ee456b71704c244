"""``dist.monitored_barrier`` of a group of pycoll says what gloo's says."""

import re
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from pycoll.errors import CollTimeout  # noqa: E402
from pycoll.torch import BackendTimeout  # noqa: E402
from worlds_torch import run_group  # noqa: E402

SHORT = timedelta(seconds=0.4)


def told(call, *args, **kwargs):
    with pytest.raises(RuntimeError) as raised:
        call(*args, **kwargs)
    return type(raised.value), str(raised.value).split("\n Original exception")[0]


def said(n, late, backend, **options):
    """Return what ranks say of a barrier to which the late ones do not come."""

    def body(rank, n):
        dist.monitored_barrier()
        dist.monitored_barrier(dist.group.WORLD, timedelta(seconds=20), wait_all_ranks=True)
        group = dist.new_group(range(n))
        dist.monitored_barrier(group)
        if rank in late:
            time.sleep(1.0)
            return None
        return told(dist.monitored_barrier, group, SHORT, **options)

    return run_group(n, body, backend=backend, limit_s=5.0)


@pytest.mark.parametrize("all_ranks", [False, True])
def test_the_words_are_those_of_gloo(all_ranks):
    ours = said(4, (1, 3), "pycoll", wait_all_ranks=all_ranks)
    who = "Ranks 1, 3" if all_ranks else "Rank 1"
    assert ours[0] == (BackendTimeout, f"[Rank 0]: {who} failed to pass monitoredBarrier in 400 ms")
    assert ours[2][1].startswith("Rank 2 successfully reached monitoredBarrier, but received")


def test_beside_gloo():
    """Without the place in PyTorch's sources, with which gloo's texts begin."""
    ours, theirs = (said(3, (1,), backend) for backend in ("pycoll", "gloo"))
    for rank in (0, 2):
        text = re.sub(r"\[/?pytorch\S+\] ?", "", theirs[rank][1]).strip()
        assert text.endswith(ours[rank][1]), (text, ours[rank][1])


def test_rank_0_has_no_time():
    def body(rank, n):
        group = dist.new_group(range(n))
        answer = None if rank else told(group.monitored_barrier, timedelta(0))
        dist.barrier()
        return answer

    assert "Rank 0 timed out in monitoredBarrier after 0 ms" in run_group(2, body)[0][1]


def test_other_ranks_wait_longer_than_the_timeout():
    """Only rank 0 says that the time is over."""

    def body(rank, n):
        if rank == 0:
            time.sleep(0.5)
        dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        return True

    assert run_group(2, body) == [True] * 2


def test_the_error_knows_who_is_missing():
    def body(rank, n):
        group = dist.new_group(range(n))
        if rank == 2:
            time.sleep(0.8)
            return None
        with pytest.raises(BackendTimeout, match=r" Timed out \(CollTimeout\): ") as raised:
            dist.barrier(group=group) if rank else group.monitored_barrier(SHORT)
        cause = raised.value.__cause__
        cause = cause.__cause__ if isinstance(cause, BackendTimeout) else cause
        assert "rank 2: has not made this call" in str(raised.value)
        return isinstance(cause, CollTimeout) and cause.missing

    assert run_group(3, body)[:2] == [(2,), (2,)]


def test_a_timeout_in_seconds_and_a_group_without_this_rank():
    def body(rank, n):
        pair = dist.new_group([0, 1])
        dist.monitored_barrier(pair, 5.0)
        return rank

    assert run_group(3, body) == [0, 1, 2]
