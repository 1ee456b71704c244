"""A message that takes longer than the group allows ends the group, and moves no more."""

import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch.distributed as dist  # noqa: E402

import pycoll.torch  # noqa: E402
import worlds_torch  # noqa: E402
from worlds_torch import run_group  # noqa: E402

LIMIT_S = 0.5
COUNT = 1 << 20  # of elements: more than any mailbox holds


@pytest.fixture(params=[(), (0, 1)], ids=["one host", "two hosts"])
def hosts(request, monkeypatch):
    monkeypatch.setattr(worlds_torch, "HOSTS", request.param)


def late(call):
    with pytest.raises(pycoll.torch.BackendTimeout, match=r"which is at an end") as caught:
        call()
    return str(caught.value)


def ended(call):
    with pytest.raises(dist.DistBackendError, match=r"gave up waiting for a message") as caught:
        call()
    return str(caught.value)


def test_a_sender_that_gives_up_may_change_its_tensor():
    """Between hosts the receiver has memory for what nobody has asked for yet."""

    def body(rank, n):
        if rank == 0:
            x = torch.full((COUNT,), 1.0)
            text = late(lambda: dist.send(x, 1))
            x.fill_(9.0)
            time.sleep(2 * LIMIT_S)
            return text
        time.sleep(3 * LIMIT_S)
        y = torch.zeros(COUNT)
        text = ended(lambda: dist.recv(y, 0))
        assert not (y == 9.0).any()
        return text

    for text in run_group(2, body, limit_s=LIMIT_S):
        assert "send on rank 0" in text


@pytest.mark.usefixtures("hosts")
def test_a_receiver_that_gives_up_may_use_its_tensor():
    def body(rank, n):
        if rank == 0:
            time.sleep(3 * LIMIT_S)
            text = ended(lambda: dist.send(torch.full((4,), 7.0), 1))
            time.sleep(LIMIT_S)
            return text
        x = torch.zeros(4)
        text = late(lambda: dist.recv(x, 0))
        x.fill_(5.0)
        time.sleep(3 * LIMIT_S)
        ended(lambda: dist.recv(torch.zeros(4), 0))
        assert x.tolist() == [5.0] * 4
        return text

    for text in run_group(2, body, limit_s=LIMIT_S):
        assert "recv on rank 1" in text


@pytest.mark.usefixtures("hosts")
def test_what_comes_later_is_not_taken_by_a_look_at_another_message():
    """Whoever looks moves all messages of the rank."""

    def body(rank, n):
        x, y = torch.zeros(4), torch.zeros(4)
        if rank == 0:
            time.sleep(2 * LIMIT_S)
            for tag in (0, 1):
                dist.send(torch.ones(4), 1, tag=tag)
            time.sleep(2 * LIMIT_S)
            return True
        other, session = dist.irecv(y, 0, tag=1), dist.group.WORLD._caller.session
        session.abort = lambda text: None  # as if rank 0 had not heard of it yet
        late(lambda: dist.recv(x, 0))
        del session.abort
        time.sleep(2 * LIMIT_S)
        for _ in range(100):
            assert not other.is_completed()
        return x.tolist() + y.tolist() == [0.0] * 8

    assert run_group(2, body, limit_s=LIMIT_S) == [True] * 2


@pytest.mark.usefixtures("hosts")
def test_a_limit_of_the_wait_leaves_the_message_under_way():
    def body(rank, n):
        x = torch.zeros(4)
        if rank == 0:
            time.sleep(LIMIT_S)
            dist.send(torch.ones(4), 1)
        else:
            work = dist.irecv(x, 0)
            with pytest.raises(pycoll.torch.BackendTimeout):
                work.wait(timedelta(seconds=0.05))
            work.wait()
            assert x.tolist() == [1.0] * 4
        dist.barrier()

    run_group(2, body)
