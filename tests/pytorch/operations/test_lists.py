"""Lists of large tensors: taken where they lie, or packed in symmetric memory if there is room."""

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


def outputs(how, rank, n, x):
    """Return a list to receive blocks like x, of one of many kinds."""
    count, own = x.numel(), [torch.zeros_like(x) for _ in range(n)]
    if how == "in place":
        own[rank] = x
    elif how == "into another's":  # whose block then overwrites the input
        own[(rank + 1) % n] = x
    elif how == "pieces of one":
        own = list(torch.zeros(n * count).chunk(n))[::-1]
    elif how == "with gaps":
        own = [torch.zeros(count, 2)[:, 0] for _ in range(n)]
    elif how == "on top of each other":
        own = [own[0]] * n
    elif how == "out of step":
        raw = bytearray(4 * count * n + 8 * n)
        own = [
            torch.frombuffer(raw, dtype=torch.float32, count=count, offset=i * (4 * count + 5))
            for i in range(n)
        ]
    elif how == "differs by rank":
        own = outputs("with gaps" if rank == 0 else "pieces of one", rank, n, x)
    return own


KINDS = ["apart", "in place", "into another's", "pieces of one", "with gaps"]
KINDS += ["on top of each other", "out of step", "differs by rank"]


@pytest.mark.parametrize("single_copy", ["auto", "off"])
@pytest.mark.parametrize("n", [2, 3])
def test_lists_of_many_kinds(monkeypatch, n, single_copy):
    """As often as it takes to try both ways of private arrays, whose blocks must not mix."""
    monkeypatch.setenv("PYCOLL_SINGLE_COPY", single_copy)

    def body(rank, n):
        wrong, last = [], n - 1
        for how in KINDS:
            for turn in range(12 if how in ("apart", "in place") else 2):
                blocks = [torch.arange(LARGE) + 1000.0 * r + turn for r in range(n)]
                x = blocks[rank].clone()
                got = outputs(how, rank, n, x)
                dist.all_gather(got, x, async_op=turn % 2 == 1) and dist.barrier()
                wanted = [blocks[last]] * n if how == "on top of each other" else blocks
                wrong += [] if all(map(torch.equal, got, wanted)) else [("all_gather", how, turn)]
                x = blocks[rank].clone()
                got = outputs(how, rank, n, x) if rank == last else None
                dist.gather(x, got, last)
                good = got is None or all(map(torch.equal, got, wanted))
                wrong += [] if good else [("gather", how, turn)]
                y = torch.zeros(LARGE)
                given = outputs(how, rank, n, y) if rank == last else []
                for tensor, one in zip(given, blocks, strict=False):
                    tensor.copy_(one)
                told = [tensor.clone() for tensor in given] or None
                dist.scatter(y, given or None, last)
                wanted = blocks[rank] if told is None else told[rank]
                if how != "on top of each other" and not torch.equal(y, wanted):
                    wrong.append(("scatter", how, turn))
        return wrong

    assert run_group(n, body, timeout=100) == [[]] * n


def test_small_and_large_lists_of_every_type():
    def body(rank, n):
        wrong = []
        for dtype in (torch.uint8, torch.bfloat16, torch.float64, torch.complex128, torch.bool):
            size = torch.empty((), dtype=dtype).element_size()
            for nbytes in (100, 64 << 10, (128 << 10) - 16, 128 << 10, 1 << 20):
                values = torch.arange(nbytes // size) % 7
                blocks = [(values + r).to(dtype) for r in range(n)]
                got = [torch.empty_like(b) for b in blocks]
                dist.all_gather(got, blocks[rank])
                wrong += [] if all(map(torch.equal, got, blocks)) else [(dtype, nbytes)]
                y = torch.empty_like(blocks[0])
                dist.scatter(y, blocks if rank == 0 else None, 0)
                wrong += [] if torch.equal(y, blocks[rank]) else [(dtype, nbytes, "scatter")]
        return wrong

    assert run_group(2, body) == [[]] * 2


def test_a_list_that_differs_between_ranks_is_an_error():
    def body(rank, n):
        count = LARGE + 64 * rank
        with pytest.raises(dist.DistBackendError, match="count"):
            dist.all_gather([torch.zeros(count) for _ in range(n)], torch.zeros(count))
        return True

    assert run_group(2, body) == [True] * 2


def test_many_different_lists():
    """More than are remembered, each twice: the second time they are taken where they lie."""

    def body(rank, n):
        held, wrong = [], []
        for turn in range(300):
            got = [torch.zeros(50 + turn % 7) for _ in range(n)]
            held.append((got, torch.zeros(1 + turn * 13 % 400)))
            for again in range(2):
                dist.all_gather(got, torch.full_like(got[0], rank + turn + again))
                good = all(bool((t == r + turn + again).all()) for r, t in enumerate(got))
                wrong += [] if good else [(turn, again)]
        return wrong

    assert run_group(3, body, timeout=60) == [[]] * 3
