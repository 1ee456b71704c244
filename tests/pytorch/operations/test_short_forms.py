"""Methods of a group with a reduction, a root or a timeout in place of options, as PyTorch's."""

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from worlds_torch import run_group  # noqa: E402

MAX, SOON = dist.ReduceOp.MAX, timedelta(seconds=9)


def reductions(group, rank):
    for more in ((), (MAX,), (MAX, SOON)):
        for wrap in (list, lambda xs: xs[0]):
            x = torch.tensor([rank + 1.0, -rank])
            group.allreduce(wrap([x]), *more).wait()
            yield x
    x = torch.tensor([rank + 1.0, -rank])
    group.allreduce([x], op=MAX, timeout=SOON).wait()
    yield x
    x = torch.tensor([rank + 1.0, -rank])
    group.reduce(x, 1, MAX).wait()
    yield x if rank == 1 else None
    out = torch.zeros(2)
    group.reduce_scatter(out, [torch.tensor([rank, 2.0 * r]) for r in range(2)], op=MAX).wait()
    yield out


def moves(group, rank):
    x = torch.tensor([rank + 1.0, -rank])
    parts = [torch.zeros(2) for _ in range(2)]
    group.allgather(parts, x).wait()
    yield torch.stack(parts)
    out = torch.zeros(2)
    group.scatter(out, [x, x + 1] if rank == 1 else [], 1).wait()
    yield out
    out = torch.zeros(2)
    group.alltoall_base(out, x, [], [], SOON).wait()
    yield out
    group.broadcast(x, root=1, timeout=SOON).wait()
    yield x
    group.barrier(timeout=SOON).wait()


def body(rank, n):
    group = dist.group.WORLD
    return [*reductions(group, rank), *moves(group, rank)]


def test_short_forms_do_what_those_of_gloo_do():
    ours, theirs = (run_group(2, body, backend=backend) for backend in ("pycoll", "gloo"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_other_arguments_are_refused_by_name():
    def refused(rank, n):
        with pytest.raises(TypeError, match=r"expected AllreduceOptions, .* but got 'max'"):
            dist.group.WORLD.allreduce([torch.zeros(2)], "max")
        with pytest.raises(TypeError, match="unexpected arguments: wait"):
            dist.group.WORLD.allreduce([torch.zeros(2)], wait=True)
        dist.barrier()
        return True

    assert run_group(2, refused) == [True, True]
