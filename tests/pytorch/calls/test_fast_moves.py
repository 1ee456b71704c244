"""Moves and scattered sums that were made before go straight to the engine, if nothing is odd."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from worlds_torch import run_group  # noqa: E402

DTYPES = "int8 int16 int32 int64 uint8 float16 bfloat16 float32 float64 bool complex64".split()
COUNT = 60  # elements of all blocks together; 2, 3 and 4 ranks divide it


def whole(rank, dtype):
    return (torch.arange(COUNT) % 5 + rank).to(dtype)


def gathers(rank, n, dtype):
    out = torch.empty(COUNT, dtype=dtype)
    dist.all_gather_into_tensor(out, whole(rank, dtype)[: COUNT // n])
    return out, torch.cat([whole(r, dtype)[: COUNT // n] for r in range(n)])


def scatters(rank, n, dtype, op=dist.ReduceOp.SUM):
    out = torch.empty(COUNT // n, dtype=dtype)
    dist.reduce_scatter_tensor(out, whole(rank, dtype), op)
    inputs = [whole(r, dtype).chunk(n)[rank] for r in range(n)]
    total = torch.stack(inputs).any(0) if dtype is torch.bool else sum(inputs)
    return out, total / n if op == dist.ReduceOp.AVG else total


def sends(rank, n, dtype):
    x = whole(rank, dtype)
    dist.broadcast(x, n - 1)
    return x, whole(n - 1, dtype)


def exchanges(rank, n, dtype):
    out = torch.empty(COUNT, dtype=dtype)
    dist.all_to_all_single(out, whole(rank, dtype))
    return out, torch.cat([whole(r, dtype).chunk(n)[rank] for r in range(n)])


CALLS = {"all_gather": gathers, "reduce_scatter": scatters, "broadcast": sends}
CALLS |= {"all_to_all": exchanges}


def hot_kinds():
    return {key[0].name.lower() for key in dist.group.WORLD._caller.kept}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_type(n):
    def body(rank, n):
        for _ in range(4):
            for name in DTYPES:
                for call in CALLS.values():
                    out, expected = call(rank, n, getattr(torch, name))
                    assert torch.equal(out, expected), (call, name)
        return hot_kinds()

    assert run_group(n, body) == [set(CALLS)] * n


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_operations_are_apart(op):
    """Calls that differ in nothing else."""

    def body(rank, n):
        results = []
        for _ in range(3):
            for name in ("SUM", op, "SUM"):
                x, out = torch.full((8,), rank + 1.0), torch.empty(4)
                dist.all_reduce(x, getattr(dist.ReduceOp, name))
                dist.reduce_scatter_tensor(
                    out, torch.full((8,), rank + 1.0), getattr(dist.ReduceOp, name)
                )
                results.append((name, set(x.tolist()) | set(out.tolist())))
        return results

    expected = {"SUM": {3.0}, "AVG": {1.5}, "MAX": {2.0}}
    for results in run_group(2, body):
        assert results == [(name, expected[name]) for name, _ in results]


def test_roots_are_apart():
    def body(rank, n):
        found = []
        for root in [*range(n)] * 3:
            x = torch.full((5,), float(rank))
            dist.broadcast(x, root)
            found.append(x.unique().item() == root)
        return all(found)

    assert run_group(3, body) == [True] * 3


def test_input_in_its_place():
    def body(rank, n):
        ok = []
        for turn in range(4):
            out = torch.full((n * 10,), -1.0)
            mine = out[rank * 10 : rank * 10 + 10]
            mine.fill_(rank + turn)
            dist.all_gather_into_tensor(out, mine)
            ok.append(out.tolist() == [float(r + turn) for r in range(n) for _ in range(10)])
        return all(ok)

    assert run_group(3, body) == [True] * 3


@pytest.mark.parametrize("first", [0, 3, 10, 25])
def test_input_that_the_output_overwrites(first):
    """It counts as it was before the call."""

    def body(rank, n):
        ok = []
        for turn in range(4):
            memory = torch.arange(60.0) + 100 * rank + turn
            x, out = memory[first : first + 10], memory[: 10 * n]
            dist.all_gather_into_tensor(out, x)
            expected = torch.cat([torch.arange(60.0)[first : first + 10] + 100 * r for r in (0, 1)])
            ok.append(torch.equal(out, expected + turn))
            memory = torch.arange(60.0) + 100 * rank + turn
            x, out = memory[:20], memory[first : first + 10]
            dist.reduce_scatter_tensor(out, x)
            total = 2 * torch.arange(20.0) + 100 + 2 * turn
            ok.append(torch.equal(out, total.chunk(2)[rank]))
        return all(ok)

    assert run_group(2, body) == [True] * 2


def odd(kind, rank, n):
    """Return calls like one that was made, but for something that is odd."""
    x, out = torch.ones(COUNT), torch.empty(COUNT // n)
    freed = torch.ones(COUNT)
    freed.untyped_storage().resize_(8)
    if kind == "freed input":
        return lambda: dist.reduce_scatter_tensor(out, freed)
    if kind == "freed output":
        return lambda: dist.all_gather_into_tensor(freed, x[: COUNT // n])
    if kind == "freed tensor":
        return lambda: dist.broadcast(freed, 0)
    if kind == "another type":
        return lambda: dist.all_gather_into_tensor(torch.empty(COUNT), x[: COUNT // n].int())
    if kind == "a short output":
        return lambda: dist.all_gather_into_tensor(torch.empty(COUNT - n), x[: COUNT // n])
    return lambda: dist.all_to_all_single(torch.empty(COUNT).reshape(3, COUNT // 3), x)


ODD = ["freed input", "freed output", "freed tensor", "another type", "a short output", "3 rows"]


@pytest.mark.parametrize("kind", ODD)
def test_what_is_odd_is_refused_on_all(kind):
    def body(rank, n):
        for _ in range(2):
            for call in CALLS.values():
                call(rank, n, torch.float32)
        assert hot_kinds() == set(CALLS)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            odd(kind, rank, n)()
        out, expected = gathers(rank, n, torch.float32)
        return torch.equal(out, expected) and bool(str(caught.value))

    assert run_group(2, body) == [True] * 2


def test_tensors_that_do_not_lie_as_they_are():
    def body(rank, n):
        ok = []
        for _ in range(3):
            for call in CALLS.values():
                call(rank, n, torch.float32)
            wide = torch.zeros(COUNT, 2)
            dist.all_gather_into_tensor(wide[:, 0], whole(rank, torch.float32)[: COUNT // n])
            ok.append(torch.equal(wide[:, 0], gathers(rank, n, torch.float32)[1]))
            negative = torch._neg_view(whole(rank, torch.float32))
            out = torch.empty(COUNT // n)
            dist.reduce_scatter_tensor(out, negative)
            ok.append(torch.equal(out, -scatters(rank, n, torch.float32)[1]))
        return all(ok)

    assert run_group(2, body) == [True] * 2


def test_ranks_that_differ():
    """A call that goes straight to the engine is compared like any other."""

    def body(rank, n):
        for _ in range(2):
            for call in CALLS.values():
                call(rank, n, torch.float32)
        with pytest.raises(dist.DistBackendError) as caught:
            (gathers if rank == 0 else exchanges)(rank, n, torch.float32)
        return str(caught.value)

    for text in run_group(2, body):
        assert "all_gather" in text
        assert "all_to_all" in text
        assert "test_fast_moves.py" in text
