"""Calls whose blocks differ in size: types and sizes are compared although bytes are moved."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import worlds_torch  # noqa: E402
from worlds_torch import run_group  # noqa: E402

FLOAT, INT, COMPLEX = torch.float32, torch.int32, torch.complex64


def all_gather(rank, n, dtype, k):
    outs = [torch.zeros(k * (r + 1), dtype=dtype) for r in range(n)]
    return outs, lambda: dist.all_gather(outs, torch.ones(k * (rank + 1), dtype=dtype))


def all_to_all(rank, n, dtype, k):
    """The blocks are as large as each other, too."""
    outs = [torch.zeros(k, dtype=dtype) for _ in range(n)]
    return outs, lambda: dist.all_to_all(outs, [torch.ones(k, dtype=dtype) for _ in range(n)])


def all_to_all_single(rank, n, dtype, k):
    out, splits = torch.zeros(k * n, dtype=dtype), [k] * n
    return [out], lambda: dist.all_to_all_single(out, torch.ones_like(out), splits, splits)


def reduce_scatter(rank, n, dtype, k, op=dist.ReduceOp.SUM):
    out = torch.zeros(k * (rank + 1), dtype=dtype)
    parts = [torch.ones(k * (r + 1), dtype=dtype) for r in range(n)]
    return [out], lambda: dist.reduce_scatter(out, parts, op)


def reduce_scatter_max(rank, n, dtype, k):
    return reduce_scatter(rank, n, dtype, k, dist.ReduceOp.MAX)


HALVES, BYTES = ((torch.int16, 2), (INT, 1)), ((torch.bool, 1), (torch.uint8, 1))
MIXES = [
    *((call, ((FLOAT, 2), (INT, 2))) for call in (all_gather, all_to_all, all_to_all_single)),
    *((call, HALVES) for call in (all_gather, all_to_all, all_to_all_single)),
    (reduce_scatter, ((COMPLEX, 1), (FLOAT, 2))),  # PyTorch itself makes others real
    (reduce_scatter, ((FLOAT, 2), (INT, 2))),
    (reduce_scatter_max, BYTES),
    (all_gather, ((torch.float8_e5m2, 1), (torch.float8_e4m3fn, 1))),
]


@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_types_that_differ(hosts, monkeypatch):
    monkeypatch.setattr(worlds_torch, "HOSTS", hosts)

    def body(rank, n):
        found = []
        for call, kinds in MIXES:
            outs, run = call(rank, n, *kinds[rank])
            with pytest.raises(dist.DistBackendError) as told:
                run()
            text = str(told.value)
            good = "MismatchError" in text and "dtype" in text and "test_uneven.py" in text
            clean = all(not out.view(torch.uint8).any() for out in outs)
            found += [] if good and clean else [(call.__name__, kinds, text)]
        outs, run = all_gather(rank, n, FLOAT, 3)
        run()  # the group stays usable
        return found, [out.sum().item() for out in outs]

    assert run_group(2, body) == [([], [3.0, 6.0])] * 2


@pytest.mark.parametrize("hosts", [(), (0, 0, 1)])
def test_a_list_of_the_right_size_in_all_only(hosts, monkeypatch):
    """The blocks would end up in each other's tensors."""
    monkeypatch.setattr(worlds_torch, "HOSTS", hosts)

    def body(rank, n):
        sizes = [4, 3, 5]
        for lists in ([4, 5, 3], sizes):
            outs = [torch.full((k,), -1.0) for k in (lists if rank == 0 else sizes)]
            right = lists is sizes
            if right:
                dist.all_gather(outs, torch.full((sizes[rank],), float(rank)))
            else:
                with pytest.raises(dist.DistBackendError, match=r"which expects \[16, 20, 12\]"):
                    dist.all_gather(outs, torch.full((sizes[rank],), float(rank)))
            wanted = [float(r) if right else -1.0 for r in range(n)]
            assert all(bool((t == w).all()) for t, w in zip(outs, wanted, strict=True))

    run_group(3, body)
