"""Floats of 8 bits through torch.distributed: PyTorch converts, pycoll adds."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from worlds_torch import run_group  # noqa: E402

OP = dist.ReduceOp
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
OPS = {
    OP.SUM: lambda x: x.sum(0),
    OP.AVG: lambda x: x.sum(0) / len(x),
    OP.PRODUCT: lambda x: x.prod(0),
    OP.MIN: lambda x: x.amin(0),
    OP.MAX: lambda x: x.amax(0),
}


def part(dtype, rank, count=77):
    """Return numbers of a rank that add and multiply exactly in float32."""
    return ((torch.arange(count) * 5 + rank) % 9 - 4).to(dtype)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_reductions(n):
    def body(rank, n):
        for dtype in TYPES:
            parts = torch.stack([part(dtype, r).float() for r in range(n)])
            for op, combined in OPS.items():
                want = combined(parts).to(dtype).float()
                x = part(dtype, rank)
                dist.all_reduce(x, op)
                assert x.dtype is dtype
                assert torch.equal(x.float(), want), (dtype, op)
            whole = torch.stack([part(dtype, r, 5 * n).float() for r in range(n)]).sum(0)
            x = torch.empty(5, dtype=dtype)
            dist.reduce_scatter_tensor(x, part(dtype, rank, 5 * n))
            assert torch.equal(x.float(), whole.to(dtype).float().chunk(n)[rank])
            x = part(dtype, rank)
            dist.reduce(x, 0, OP.SUM)
            assert rank or torch.equal(x.float(), parts.sum(0).to(dtype).float())
            x = part(dtype, rank)
            dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
            assert torch.equal(x.float(), (2 * parts).sum(0).to(dtype).float())

    run_group(n, body)


def test_bitwise_operations_are_refused_on_every_rank():
    def body(rank, n):
        with pytest.raises(dist.DistBackendError, match="not defined for torch"):
            dist.all_reduce(torch.ones(3).to(torch.float8_e5m2), OP.BXOR)
        x = part(torch.float8_e4m3fn, 0)
        dist.all_reduce(x)
        return x.float()[1].item()

    assert run_group(2, body) == [2.0] * 2
