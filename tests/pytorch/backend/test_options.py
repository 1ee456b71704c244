"""The order of sums by `pg_options`, against the definition of each order, to the bit."""

from datetime import timedelta

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import oracle  # noqa: E402
import pycoll.torch  # noqa: E402
import worlds_torch  # noqa: E402
from pycoll.torch import BackendArgumentError, Options  # noqa: E402
from worlds_torch import run_group  # noqa: E402

SIZES = (1, 7, 1023, 40_001)
DTYPES = ("float32", "bfloat16", "float16")
TORCH = {name: getattr(torch, name) for name in DTYPES}


def as_torch(array):
    bits = np.dtype(f"i{array.dtype.itemsize}")
    dtype = TORCH[array.dtype.name]
    return torch.from_numpy(np.ascontiguousarray(array).view(bits)).view(dtype)


def parts_of(n, name, count):
    rng = np.random.default_rng(count)
    return [oracle.random(rng, name, count) for _ in range(n)]


def same(x, want):
    return torch.equal(x.view(torch.uint8), as_torch(want).view(torch.uint8))


def sums(rank, n):
    """Return what is not the sum in the order that the group was made with."""
    wrong, groups = [], {}
    for order in ("rank", "tree"):
        groups[order] = dist.new_group(range(n), pg_options=Options(order=order))
    for order, group in groups.items():
        for name in DTYPES:
            for count in SIZES:
                parts = parts_of(n, name, count)
                want = oracle.reduce(parts, "sum", order)
                whole, again = (as_torch(parts[rank]).clone() for _ in range(2))
                dist.all_reduce(whole, group=group)
                dist.all_reduce(again, group=group, async_op=True).wait()
                at_root = as_torch(parts[rank]).clone()
                dist.reduce(at_root, 1, group=group)
                block = as_torch(parts[rank])[: count // n * n].clone()
                share = torch.empty(count // n, dtype=TORCH[name])
                dist.reduce_scatter_tensor(share, block, group=group)
                mine = want[rank * (count // n) : (rank + 1) * (count // n)]
                good = same(whole, want) and same(again, want) and same(share, mine)
                good = good and (rank != 1 or same(at_root, want))
                wrong += [] if good else [(order, name, count)]
        uneven = parts_of(n, "float32", 10 * n + 1)
        rows = [10] * (n - 1) + [11]
        out = torch.empty(rows[rank])
        dist.reduce_scatter(out, list(as_torch(uneven[rank]).split(rows)), group=group)
        want = oracle.reduce(uneven, "sum", order)[10 * rank : 10 * rank + rows[rank]]
        wrong += [] if same(out, want) else [(order, "uneven")]
    return wrong


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sums_of_one_host(n):
    assert run_group(n, sums) == [[]] * n


def test_sums_between_hosts(monkeypatch):
    monkeypatch.setattr(worlds_torch, "HOSTS", (0, 0, 1))
    assert run_group(3, sums, limit_s=30.0) == [[]] * 3


def test_the_orders_differ():
    """Else the tests above could not tell them apart."""
    parts = parts_of(4, "float32", 1023)
    rank, tree = (oracle.reduce(parts, "sum", order) for order in ("rank", "tree"))
    assert (rank != tree).sum() > 100


def test_any_order_gives_all_ranks_the_same():
    def body(rank, n):
        group = dist.new_group(range(n), pg_options=Options(order="any"))
        x = as_torch(parts_of(n, "float32", 5000)[rank])
        dist.all_reduce(x, group=group)
        return x.numpy().tobytes()

    found = run_group(3, body)
    assert len(set(found)) == 1
    want = oracle.reduce(parts_of(3, "float32", 5000), "sum")
    np.testing.assert_allclose(np.frombuffer(found[0], np.float32), want, rtol=1e-4, atol=1e-4)


def test_an_order_that_is_not_known():
    for order in ("serial", "RANK", None, 3):
        with pytest.raises(ValueError, match="accepted: 'rank', 'tree', 'any'"):
            Options(order=order)


def test_options_of_another_backend_reach_the_peers():
    def body(rank, n):
        options = {"order": "rank"} if rank else Options(order="rank")
        with pytest.raises(dist.DistBackendError) as told:
            dist.new_group(range(n), pg_options=options)
        return type(told.value) is BackendArgumentError, str(told.value)

    (first, peer), (second, own) = run_group(2, body)
    assert not first
    assert "rank 1 cannot join" in peer
    assert second
    assert "accepted: pycoll.torch.Options" in own


def test_orders_that_differ():
    def body(rank, n):
        with pytest.raises(BackendArgumentError) as told:
            dist.new_group(range(n), pg_options=Options(order=("rank", "tree")[rank]))
        return str(told.value)

    for text in run_group(2, body):
        assert "order is rank 0 'rank', rank 1 'tree'" in text


def test_options_of_the_first_group(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    where = {"store": store, "rank": 0, "world_size": 1, "timeout": timedelta(seconds=5)}
    dist.init_process_group(pycoll.torch.NAME, pg_options=Options(order="rank"), **where)
    try:
        assert dist.group.WORLD._caller.calls.order == "rank"
    finally:
        dist.destroy_process_group()
