"""Lists of large tensors, which are packed in symmetric memory where there is room."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from worlds_torch import run_group  # noqa: E402

LARGE = (1 << 18) + 3  # elements, of 4 bytes


def exchange(rank, n, symmetric):
    """Make every call that takes a list, twice; return what was wrong."""
    wrong = []
    counts = [LARGE + 5 * r for r in range(n)]
    x = torch.full((LARGE,), rank + 1.0)
    if symmetric:
        group = dist.group.WORLD
        x = group.allocate_tensor(LARGE, dtype=torch.float32).fill_(rank + 1.0)
    for _ in range(2):
        found = {}
        found["all_gather"] = [torch.zeros(LARGE) for _ in range(n)]
        dist.all_gather(found["all_gather"], x)
        found["ragged"] = [torch.zeros(k) for k in counts]
        dist.all_gather(found["ragged"], torch.full((counts[rank],), rank + 1.0))
        found["gather"] = [torch.zeros(LARGE) for _ in range(n)] if rank == 1 else []
        dist.gather(x, found["gather"] or None, 1)
        found["all_to_all"] = [torch.zeros(counts[rank]) for _ in range(n)]
        dist.all_to_all(found["all_to_all"], [torch.full((k,), rank + 1.0) for k in counts])
        for name, tensors in found.items():
            good = all(bool((t == r + 1).all()) for r, t in enumerate(tensors))
            wrong += [] if good else [name]
        y = torch.zeros(LARGE)
        dist.scatter(y, [r * x for r in range(n)] if rank == 1 else None, 1)
        wrong += [] if bool((y == 2 * rank).all()) else ["scatter"]
        dist.reduce_scatter(y, [r * x for r in range(n)])
        wrong += [] if bool((y == rank * n * (n + 1) / 2).all()) else ["reduce_scatter"]
    return wrong


@pytest.mark.parametrize("symmetric", [False, True])
def test_large_lists(symmetric):
    assert run_group(3, exchange, symmetric, timeout=60) == [[]] * 3


def test_large_lists_without_room(monkeypatch):
    """Where nobody has asked for symmetric memory, there need be none."""
    monkeypatch.setenv("PYCOLL_HEAP_BYTES", "1M")
    assert run_group(3, exchange, False, timeout=60) == [[]] * 3


def test_a_full_heap_is_told_to_all(monkeypatch):
    monkeypatch.setenv("PYCOLL_HEAP_BYTES", "8M")

    def body(rank, n):
        x = dist.group.WORLD.allocate_tensor(LARGE, dtype=torch.float32)
        keep = [
            dist.group.WORLD.allocate_tensor(LARGE, dtype=torch.float32) for _ in range(4 * rank)
        ]
        with pytest.raises(dist.DistBackendError) as told:
            dist.all_gather([torch.empty(LARGE) for _ in range(n)], x)
        del keep
        dist.all_reduce(x.fill_(1))
        return str(told.value), x[0].item()

    (first, a), (second, b) = run_group(2, body)
    assert a == b == 2
    assert "PeerRejected" in first
    assert "MemoryError" in second
