"""Arguments that do not fit: every rank raises, no memory is touched, the group stays usable."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import worlds_torch  # noqa: E402
from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.torch.calls.prepare import Calls  # noqa: E402
from pycoll.torch.tensors.layout import Request  # noqa: E402
from pycoll.types import Kind, ReduceOp  # noqa: E402
from worlds_torch import run_group  # noqa: E402

GUARD = -7.0
N = 2


class Guarded:
    """Views of one memory, with values between and behind them that nobody may change."""

    def __init__(self):
        self._memory = torch.full((4096,), GUARD)
        self._used = torch.zeros(4096, dtype=torch.bool)
        self._end = 64

    def take(self, *shape):
        """Return a view of that shape, full of guard values too."""
        view = self._memory[self._end : self._end + int(torch.tensor(shape).prod())].view(shape)
        self._end += view.numel() + 64
        return view

    def intact(self):
        """Tell whether nothing was written, into the views either."""
        return bool((self._memory == GUARD).all())


def ones(*counts):
    return [torch.ones(count) for count in counts]


def group():
    return dist.group.WORLD


def at_root(tensors):
    return tensors if dist.get_rank() == 0 else None


# name: (the call, given memory for outputs; what the error says)
WRONG = {
    "reduce_scatter, short output": (
        lambda g: dist.reduce_scatter(g.take(2), ones(4, 4)),
        "output has 2 elements.*expected 4: as many as tensor [01] of the input list",
    ),
    "reduce_scatter, uneven list": (
        lambda g: dist.reduce_scatter(g.take(2), ones(3, 5)),
        "output has 2 elements.*expected [35]",
    ),
    "reduce_scatter, large": (
        lambda g: dist.reduce_scatter(g.take(2), ones(10**6, 10**6)),
        "output has 2 elements.*expected 1000000",
    ),
    "reduce_scatter, short list": (
        lambda g: dist.reduce_scatter(g.take(4), ones(4)),
        "the input list has 1 tensors.*expected 2",
    ),
    "reduce_scatter, empty list": (
        lambda g: dist.reduce_scatter(g.take(4), []),
        "the input list is empty",
    ),
    "reduce_scatter_tensor": (
        lambda g: dist.reduce_scatter_tensor(g.take(2), torch.ones(8)),
        "times as many",
    ),
    "reduce_scatter_tensor, coalesced": (
        lambda g: group().reduce_scatter_tensor_coalesced(
            [g.take(2), g.take(2)], [torch.ones(4), torch.ones(8)]
        ),
        "times as many",
    ),
    "reduce_scatter_tensor, coalesced lists": (
        lambda g: group().reduce_scatter_tensor_coalesced([g.take(2)], ones(4, 4)),
        "1 outputs and 2 inputs",
    ),
    "all_gather, short input": (
        lambda g: dist.all_gather([g.take(4), g.take(4)], torch.ones(64)[:2]),
        "input has 2 elements.*expected 4: as many as tensor [01] of the output list",
    ),
    "all_gather, long input": (
        lambda g: dist.all_gather([g.take(4), g.take(4)], torch.ones(10**6)),
        "input has 1000000 elements.*expected 4",
    ),
    "all_gather, empty list": (
        lambda g: dist.all_gather([], torch.ones(2)),
        "the output list is empty",
    ),
    "all_gather, meta": (
        lambda g: dist.all_gather([torch.ones(2, device="meta"), g.take(2)], torch.ones(2)),
        "tensor 0 of the output list lives on meta",
    ),
    "all_gather_into_tensor": (
        lambda g: dist.all_gather_into_tensor(g.take(4), torch.ones(8)),
        "times as many",
    ),
    "all_gather_into_tensor, coalesced": (
        lambda g: group().allgather_into_tensor_coalesced([g.take(4), g.take(4)], ones(2, 4)),
        "times as many",
    ),
    "all_gather_into_tensor, coalesced, empty": (
        lambda g: group().allgather_into_tensor_coalesced([], []),
        "no tensors",
    ),
    "all_gather, coalesced": (
        lambda g: group().allgather_coalesced([[g.take(2)], [g.take(2)]], ones(4)),
        "input has 4 elements.*expected 2",
    ),
    "all_gather, coalesced lists": (
        lambda g: group().allgather_coalesced([[g.take(2)], []], ones(2)),
        "row 1 of the outputs has 0 tensors.*expected 1",
    ),
    "gather": (
        lambda g: dist.gather(torch.ones(8), at_root([g.take(4), g.take(4)])),
        "tensor 0 has 4 elements.*expected 8",
    ),
    "scatter": (
        lambda g: dist.scatter(g.take(2), at_root(ones(4, 4))),
        "tensor 0 has 4 elements.*expected 2",
    ),
    "all_to_all_single, short output": (
        lambda g: dist.all_to_all_single(g.take(2), torch.ones(8)),
        "output has 2 elements.*input 8",
    ),
    "all_to_all_single, short input": (
        lambda g: dist.all_to_all_single(g.take(8), torch.ones(2)),
        "output has 8 elements.*input 2",
    ),
    "all_to_all_single, large": (
        lambda g: dist.all_to_all_single(g.take(2), torch.ones(2 * 10**6)),
        "output has 2 elements.*input 2000000",
    ),
    "all_to_all_single, odd": (
        lambda g: dist.all_to_all_single(g.take(3), torch.ones(3)),
        "not a multiple of 2",
    ),
    "all_to_all_single, types": (
        lambda g: group().alltoall_base(g.take(4), torch.ones(4).double(), [], []),
        "float32.*float64",
    ),
    "all_to_all_single, output splits": (
        lambda g: dist.all_to_all_single(g.take(4), torch.ones(4), [2, 4], [2, 2]),
        "output split sizes.*add up to 4",
    ),
    "all_to_all_single, input splits": (
        lambda g: dist.all_to_all_single(g.take(4), torch.ones(4), [2, 2], [3, 2]),
        "input split sizes.*add up to 4",
    ),
    "all_to_all_single, negative": (
        lambda g: dist.all_to_all_single(g.take(4), torch.ones(4), [2, 2], [-1, 5]),
        "input split sizes",
    ),
    "all_to_all, short outputs": (
        lambda g: dist.all_to_all([g.take(2), g.take(2)], ones(4, 4)),
        "tensor [01].*has 2 elements.*expected 4",
    ),
    "all_to_all, empty": (
        lambda g: dist.all_to_all([], []),
        "the input list is empty",
    ),
    "all_to_all, empty inputs": (
        lambda g: group().alltoall([g.take(2), g.take(2)], []),
        "the input list is empty",
    ),
    "all_to_all, types": (
        lambda g: group().alltoall([g.take(2), g.take(2)], [torch.ones(2), torch.ones(2).double()]),
        "tensor 1 is torch.float64, expected torch.float32",
    ),
    "broadcast, root": (
        lambda g: dist.broadcast(g.take(4), 5),
        "root 5 is not a rank.*0 to 1",
    ),
    "reduce, root": (
        lambda g: dist.reduce(g.take(4), 5),
        "root 5 is not a rank.*0 to 1",
    ),
    "gather, root": (
        lambda g: dist.gather(torch.ones(3), None, 3),
        "root 3 is not a rank",
    ),
    "scatter, root": (
        lambda g: dist.scatter(g.take(3), None, 3),
        "root 3 is not a rank",
    ),
    "all_reduce, none": (lambda g: group().allreduce([]), "0 tensors"),
    "all_reduce, coalesced, none": (lambda g: group().allreduce_coalesced([]), "no tensors"),
}


def still_usable(n):
    x = torch.ones(3)
    dist.all_reduce(x)
    return bool((x == n).all())


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_fit(name):
    call, text = WRONG[name]

    def body(rank, n):
        guarded = Guarded()
        error = dist.DistBackendError if "at_root" in call.__code__.co_names else ValueError
        with pytest.raises(error, match=f"(?s){text}"):
            call(guarded)  # every rank's call is wrong
        assert still_usable(n)
        if rank == 0:
            with pytest.raises(ValueError, match=f"(?s)on rank 0 of 2.*{text}"):
                call(guarded)
        else:  # and these hear of it in their own call, which is fine
            with pytest.raises(dist.DistBackendError, match=f"(?s)PeerRejected.*{text}"):
                dist.all_reduce(torch.ones(2))
        assert still_usable(n)
        assert guarded.intact()

    run_group(N, body)


@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_arguments_that_no_check_knows(hosts, monkeypatch):
    """Whatever is raised while a call is prepared, the peers do not wait for it."""
    monkeypatch.setattr(worlds_torch, "HOSTS", hosts)

    def body(rank, n):
        if rank == 0:
            with pytest.raises(ValueError, match=r"all_to_all on rank 0(.|\n)*TypeError") as caught:
                dist.group.WORLD.alltoall_base(torch.ones(2), torch.ones(2), None, [1, "x"])
            assert isinstance(caught.value, dist.DistBackendError)
        else:
            with pytest.raises(dist.DistBackendError, match=r"PeerRejected(.|\n)*TypeError"):
                dist.all_to_all_single(torch.ones(2), torch.ones(2), [1, 1], [1, 1])
        assert still_usable(n)

    run_group(N, body)


def test_a_refusal_behind_calls_in_the_background():
    def body(rank, n):
        works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(5)]
        with pytest.raises(ValueError, match="expected 4"):
            dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(2), async_op=True)
        assert all(work.wait() for work in works)
        assert still_usable(n)

    run_group(N, body)


def test_memory_that_was_given_back():
    """FSDP frees the memory of a tensor and keeps the tensor."""

    def body(rank, n):
        assert still_usable(n)
        for offset, left in ((0, 0), (1, 0), (0, 8), (1, 12)):
            freed = torch.ones(3 + offset)[offset:]
            freed.untyped_storage().resize_(left)
            calls = lambda x: dist.broadcast(x, 0), dist.all_reduce
            for call in calls:
                with pytest.raises(ValueError, match=r"12 bytes(.|\n)*has been freed"):
                    call(freed)
        assert still_usable(n)

    run_group(N, body)


@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_the_last_check_before_the_engine(hosts, monkeypatch):
    """Were a check forgotten, the memory of a call is still compared with what its plan moves."""
    monkeypatch.setattr(worlds_torch, "HOSTS", hosts)

    def body(rank, n):
        calls, guarded = dist.group.WORLD._caller.calls, Guarded()
        assert isinstance(calls, Calls)
        for kind, x, out in (
            (Kind.ALL_GATHER, torch.ones(2), guarded.take(4 * n)),
            (Kind.ALL_GATHER, torch.ones(4), guarded.take(2)),
            (Kind.ALL_TO_ALL, torch.ones(4 * n), guarded.take(2)),
            (Kind.BROADCAST, torch.ones(2), guarded.take(4 * n)),
        ):
            with pytest.raises(ArgumentError, match="bytes"):
                calls.run(Request(kind, None, 0, 0, 5.0), x, out)
        x, short = torch.ones(4 * n), guarded.take(2)
        with pytest.raises(ArgumentError, match="bytes"):
            calls.run(Request(Kind.REDUCE_SCATTER, ReduceOp.SUM, 0, 0, 5.0), x, short)
        assert guarded.intact()
        assert still_usable(n)

    run_group(N, body)
