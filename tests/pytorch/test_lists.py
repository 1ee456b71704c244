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


@pytest.mark.parametrize("symmetric", [0, 1])
def test_one_rank_has_symmetric_tensors(symmetric):
    """Packing makes no difference to it: the rest of the call is in ordinary memory."""

    def body(rank, n):
        group = dist.group.WORLD
        x, y = torch.ones(LARGE), torch.empty(LARGE)
        if rank == symmetric:
            x = group.allocate_tensor(LARGE, dtype=torch.float32).fill_(1)
            y = group.allocate_tensor(LARGE, dtype=torch.float32)
        found = [torch.empty(LARGE) for _ in range(n)]
        dist.all_gather(found, x)
        dist.reduce_scatter(y, found)
        return bool((y == n).all()) and all(bool((t == 1).all()) for t in found)

    assert run_group(2, body) == [True] * 2
