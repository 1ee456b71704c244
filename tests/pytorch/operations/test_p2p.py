"""Tagged messages through torch.distributed, and the postbox below them."""

import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from pycoll.torch.operations.p2p import MessageWork  # noqa: E402
from worlds_torch import run_group  # noqa: E402

SIZES = [0, 1, 1000, 400_000]  # the last one is larger than a mailbox


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.complex64])
def test_types(dtype):
    def body(rank, n):
        x = (torch.arange(50) % 7).to(torch.float32).to(dtype)
        if rank == 0:
            dist.send(x, 1, tag=3)
        else:
            y = torch.empty(50, dtype=dtype)
            dist.recv(y, 0, tag=3)
            assert torch.equal(x, y)

    run_group(2, body)


@pytest.mark.parametrize("count", SIZES)
def test_a_ring_of_blocking_calls(count):
    def body(rank, n):
        x, y = torch.full((count,), float(rank)), torch.empty(count)
        for _ in range(5):
            if rank % 2 == 0:
                dist.send(x, (rank + 1) % n)
                dist.recv(y, (rank - 1) % n)
            else:
                dist.recv(y, (rank - 1) % n)
                dist.send(x, (rank + 1) % n)
            assert (y == (rank - 1) % n).all()

    run_group(4, body)


@pytest.mark.parametrize("count", SIZES)
def test_a_batch_in_any_order(count):
    def body(rank, n):
        x = [torch.full((count,), 10.0 * rank + peer) for peer in range(n)]
        y = [torch.empty(count) for _ in range(n)]
        others = [peer for peer in range(n) if peer != rank]
        ops = [dist.P2POp(dist.irecv, y[peer], peer) for peer in others]
        ops += [dist.P2POp(dist.isend, x[peer], peer) for peer in reversed(others)]
        for work in dist.batch_isend_irecv(ops[::-1] if rank % 2 else ops):
            work.wait()
        assert all((y[peer] == 10.0 * peer + rank).all() for peer in others)

    run_group(3, body)


def test_tags_choose_and_order_is_kept():
    def body(rank, n):
        if rank == 0:
            for i in range(6):
                dist.send(torch.tensor([float(i)]), 1, tag=i % 2)
        else:
            got = torch.empty(6)
            for i in (1, 3, 5):
                dist.recv(got[i : i + 1], 0, tag=1)
            works = [dist.irecv(got[i : i + 1], 0, tag=0) for i in (0, 2, 4)]
            for work in reversed(works):
                work.wait()
            assert torch.equal(got, torch.arange(6.0))

    run_group(2, body)


def test_from_any_rank():
    def body(rank, n):
        if rank == 0:
            seen = {}
            for _ in range(n - 1):
                x = torch.empty(3)
                source = dist.recv(x)
                seen[source] = x[0].item()
            assert seen == {r: float(r) for r in range(1, n)}
        else:
            dist.send(torch.full((3,), float(rank)), 0)
        group = dist.new_group([1, 2, 3])
        if rank == 1:
            assert dist.recv(torch.empty(1), group=group) == 3
        elif rank == 3:
            dist.send(torch.ones(1), 1, group=group)

    run_group(4, body)


def test_to_itself_and_not_contiguous():
    def body(rank, n):
        x = torch.arange(600_000.0).view(3, 200_000).t()
        work = dist.isend(x, 1 - rank, tag=1)
        x.fill_(7)  # it was packed; the message has the old values, and the tensor keeps the new
        z = torch.empty(200_000, 3)
        dist.recv(z, 1 - rank, tag=1)
        work.wait()
        assert torch.equal(z, torch.arange(600_000.0).view(3, 200_000).t())
        assert (x == 7).all()
        work = dist.isend(torch.arange(12.0).view(3, 4).t(), rank)
        y = torch.zeros(8, 3)
        dist.irecv(y[::2], rank).wait()
        work.wait()
        assert torch.equal(y[::2], torch.arange(12.0).view(3, 4).t())
        assert (y[1::2] == 0).all()

    run_group(2, body)


def test_a_large_message_goes_on_while_its_sender_is_elsewhere():
    """The sender is in a collective that its receiver enters only after the message."""

    def body(rank, n):
        group = dist.new_group([0, 1])
        x = torch.arange(1_000_000.0)
        if rank == 0:
            work = dist.isend(x, 1)
            dist.barrier(group)
            work.wait()
        else:
            time.sleep(0.05)
            y = torch.empty_like(x)
            dist.recv(y, 0)
            dist.barrier(group)
            assert torch.equal(x, y)

    run_group(2, body)


def test_futures_and_polling():
    def body(rank, n):
        if rank == 0:
            time.sleep(0.05)
            dist.send(torch.ones(4), 1)
            dist.send(torch.ones(4), 1, tag=1)
        else:
            x, y = torch.zeros(4), torch.zeros(4)
            work = dist.irecv(x, 0)
            assert not work.is_completed()
            while not work.is_completed():
                time.sleep(0.001)
            assert work.is_success()
            assert work.get_future_result().wait() == 0  # SUCCESS
            assert (x == 1).all()
            assert (dist.irecv(y, 0, tag=1).get_future().wait()[0] == 1).all()

    run_group(2, body)


def test_many_that_nobody_waits_for():
    def body(rank, n):
        if rank == 0:
            for i in range(300):
                dist.isend(torch.full((20_000,), float(i)), 1, tag=i)
        else:
            never = dist.irecv(torch.empty(1), 0, tag=1000)
            got = torch.empty(300, 20_000)
            for i in reversed(range(300)):
                dist.irecv(got[i], 0, tag=i)
            while (got[:, -1] != torch.arange(300.0)).any():
                dist.irecv(torch.empty(1), 1, tag=2000)  # a post sweeps
                time.sleep(0.001)
            assert not never.is_completed()
            assert len(dist.group.WORLD._messages.pending) < 1000
        dist.barrier()

    run_group(2, body)


def test_each_of_many_is_looked_at_a_few_times(monkeypatch):
    """A look costs as much as there are messages, so that looks in every post go with the cube."""
    looks, real = [], MessageWork.is_completed
    monkeypatch.setattr(MessageWork, "is_completed", lambda work: looks.append(1) or real(work))

    def body(rank, n):
        count, group = 1000, dist.group.WORLD
        got = torch.zeros(count)
        works = [dist.irecv(got[i : i + 1], rank, tag=i) for i in range(count)]
        assert len(group._messages.pending) == count
        assert 0 < len(looks) < 4 * count
        for i in range(count):
            dist.isend(torch.tensor([float(i)]), rank, tag=i)
        for work in works:
            work.wait()
        assert torch.equal(got, torch.arange(float(count)))
        # Afterwards no more are kept than at first: the last look had left hundreds.
        for i in range(count):
            last = dist.irecv(got[i : i + 1], rank, tag=i)
            dist.isend(torch.zeros(1), rank, tag=i).wait()
            assert len(group._messages.pending) <= 64
        last.wait()
        assert (got == 0).all()

    run_group(1, body)


def test_what_does_not_fit():
    def body(rank, n):
        if rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            with pytest.raises(dist.DistBackendError, match=r"recv on rank 1(.|\n)*16 bytes"):
                dist.recv(torch.empty(5), 0)
            y = torch.empty(4)
            dist.recv(y, 0)
            assert (y == 1).all()

    run_group(2, body)


def test_from_any_rank_when_all_others_have_ended():
    """What was sent still arrives; then an error says at once that nobody is left."""

    def body(rank, n):
        x = torch.full((40_000,), float(rank))
        if rank > 0:
            dist.send(x, 0)
            dist.destroy_process_group()
            return
        sources = {dist.recv(x) for _ in range(n - 1)}
        assert sources == {1, 2}
        start = time.monotonic()
        for receive in (lambda: dist.recv(x), lambda: dist.irecv(x).wait()):
            with pytest.raises(dist.DistBackendError, match="all other ranks have closed"):
                receive()
        assert time.monotonic() - start < 5

    run_group(3, body)
