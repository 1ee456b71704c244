"""Sums of sparse tensors."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import worlds_torch  # noqa: E402
from pycoll.torch import BackendArgumentError  # noqa: E402
from worlds_torch import run_group  # noqa: E402

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8]


def dense(rank, dtype=torch.float32, shape=(7,)):
    """Return a tensor with more elements on later ranks, some in places of their own."""
    x = torch.zeros(shape, dtype=dtype)
    for i in range(2 * rank):
        x[(2 * i + rank) % 7] = i + 1
    return x


def check(n, make, dims, **options):
    """Compare with the sum of dense tensors, which are small whole numbers."""

    def body(rank, n):
        x = make(rank).to_sparse(dims)
        work = dist.all_reduce(x, **options)
        if options:
            work.wait()
        expected = sum(make(r) for r in range(n))
        assert x.is_coalesced()
        assert x.dtype == expected.dtype
        assert torch.equal(x.to_dense(), expected)
        return x._nnz()

    assert len(set(run_group(n, body))) == 1


def test_types():
    for dtype in TYPES:
        check(3, lambda rank, dtype=dtype: dense(rank, dtype), 1)


def test_shapes():
    check(3, lambda rank: dense(rank, shape=(7, 2, 3)), 1)  # rows, as those of embeddings
    check(2, lambda rank: torch.eye(3) * rank, 2)  # no elements on rank 0
    check(2, lambda rank: torch.zeros(3), 1)  # nowhere
    check(2, dense, 1, async_op=True)


def test_between_hosts(monkeypatch):
    monkeypatch.setattr(worlds_torch, "HOSTS", (0, 0, 1))
    check(3, lambda rank: dense(rank, shape=(7, 2)), 1)


def test_places_that_come_twice():
    def body(rank, n):
        x = torch.sparse_coo_tensor(
            [[0, 0, 2]], [1.0, 2.0, 3.0 + rank], (4,), check_invariants=True
        )
        dist.all_reduce(x)
        return x.to_dense().tolist()

    assert run_group(2, body) == [[6.0, 0.0, 7.0, 0.0]] * 2


def test_what_is_refused():
    """On all ranks, and the group stays usable."""

    def body(rank, n):
        x = dense(rank).to_sparse()
        with pytest.raises(BackendArgumentError, match="only be combined with SUM"):
            dist.all_reduce(x, dist.ReduceOp.MAX)
        with pytest.raises(BackendArgumentError, match=r"shape \[7, 2\] with \d sparse dims"):
            dist.all_reduce(dense(rank, shape=(7, 2)).to_sparse(1 + rank))
        with pytest.raises(BackendArgumentError, match="the result would be lost"):
            dist.all_reduce(dense(rank, torch.complex64).to_sparse())
        with pytest.raises(dist.DistBackendError, match="sparse"):
            dist.broadcast(x, 0)
        dist.all_reduce(x)
        return x.to_dense().sum().item()

    assert run_group(2, body) == [3.0] * 2


def test_different_shapes_are_the_same_error_on_all_ranks():
    def body(rank, n):
        with pytest.raises(BackendArgumentError) as caught:
            dist.all_reduce(torch.ones(4, 5 if rank == 1 else 4).to_sparse())
        return str(caught.value).partition("ArgumentError: ")[2]

    text = (
        "rank 0 has a sparse tensor of shape [4, 4] with 2 sparse dims, rank 1 a sparse tensor of "
        "shape [4, 5] with 2 sparse dims; expected the same on all"
    )
    assert run_group(3, body) == [text] * 3
