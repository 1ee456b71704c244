"""Errors of one rank alone, of any kind, before and between the calls that an operation makes."""

import time

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch.distributed as dist  # noqa: E402

import worlds_torch  # noqa: E402
from worlds_torch import run_group  # noqa: E402

LIMIT_S = 10  # of the group; who hears nothing waits as long


def fails(*_):
    raise RuntimeError("an odd error")


def expect(call):
    """Return the text of an error that comes long before the time limit."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    assert time.monotonic() - start < LIMIT_S / 2
    return str(caught.value)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_an_error_before_the_call_reaches_the_peers(hosts, asynchronous, monkeypatch):
    monkeypatch.setattr(worlds_torch, "HOSTS", hosts)

    def body(rank, n):
        if rank == 0:
            dist.group.WORLD._caller.calls.run = fails
        x = torch.ones(3)
        if asynchronous:
            text = expect(lambda: dist.all_reduce(x, async_op=True).wait())
        else:
            text = expect(lambda: dist.all_reduce(x))
        vars(dist.group.WORLD._caller.calls).pop("run", None)
        x.fill_(rank + 1)
        dist.all_reduce(x)  # the group stays usable
        return text, x.tolist()

    mine, other = run_group(2, body, limit_s=LIMIT_S)
    assert mine == ("an odd error", [3.0] * 3)
    assert "PeerRejected" in other[0]
    assert "an odd error" in other[0]
    assert other[1] == [3.0] * 3


def test_an_error_before_sizes_are_exchanged_reaches_the_peers(monkeypatch):
    def body(rank, n):
        if rank == 0:
            monkeypatch.setattr("pycoll.torch.operations.list_collectives.as_bytes", fails)
        outs = [torch.zeros(1), torch.zeros(2)]
        text = expect(lambda: dist.all_gather(outs, torch.ones(rank + 1)))
        monkeypatch.undo()
        dist.all_gather(outs, torch.ones(rank + 1))
        return text, [t.sum().item() for t in outs]

    for text, sums in run_group(2, body, limit_s=LIMIT_S):
        assert "an odd error" in text
        assert sums == [1.0, 2.0]


def test_an_error_between_two_calls_ends_the_group(monkeypatch):
    """The peers wait in the second one, of which this rank knows nothing."""

    def body(rank, n):
        xs = [torch.ones(20_000), torch.ones(30_000)]  # too large to share a call
        if rank == 0:
            monkeypatch.setattr("pycoll.torch.operations.packing.store", fails)
        text = expect(lambda: dist.all_reduce_coalesced(xs))
        monkeypatch.undo()
        return text, expect(lambda: dist.all_reduce(xs[0]))

    (mine, then), (other, later) = run_group(2, body, limit_s=LIMIT_S)
    assert mine == "an odd error"
    for text in (then, other, later):
        assert "rank 0 has failed: RuntimeError: an odd error" in text
