"""all_reduce, reduce and reduce_scatter through torch.distributed, against sums made by hand."""

import functools
import json
import operator
import tempfile

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import oracle  # noqa: E402
from worlds_torch import run_group  # noqa: E402

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
OP = dist.ReduceOp
FOLDS = {
    OP.SUM: operator.add,
    OP.PRODUCT: operator.mul,
    OP.MIN: torch.minimum,
    OP.MAX: torch.maximum,
    OP.BAND: operator.and_,
    OP.BOR: operator.or_,
    OP.BXOR: operator.xor,
}
BITWISE = {OP.BAND, OP.BOR, OP.BXOR}


def given(dtype, rank, count=37):
    """Small values that differ between ranks, and are exact in every type."""
    values = (torch.arange(count) * 7 + rank * 3) % 5 + 1
    if dtype is torch.bool:
        return (values + rank) % 3 == 0
    if dtype.is_complex:
        return torch.complex(values.double(), values.flip(0).double()).to(dtype)
    return values.to(dtype)


def expected(dtype, n, op, count=37):
    inputs = [given(dtype, rank, count) for rank in range(n)]
    if op == OP.AVG:
        return functools.reduce(operator.add, inputs) / n
    if dtype is torch.bool:
        named = {OP.SUM: operator.or_, OP.PRODUCT: operator.and_}
        named |= {OP.MIN: operator.and_, OP.MAX: operator.or_}
        return functools.reduce(named.get(op) or FOLDS[op], inputs)
    wide = [x.to(torch.int64) if dtype in UNSIGNED else x for x in inputs]
    return functools.reduce(FOLDS[op], wide).to(dtype)


def cases():
    for dtype in FLOATS + INTS + UNSIGNED + [torch.bool]:
        for op in FOLDS:
            if not (dtype.is_floating_point and op in BITWISE):
                yield dtype, op
    for dtype in FLOATS:
        yield dtype, OP.AVG
    for dtype in COMPLEX:
        yield dtype, OP.SUM


def test_bytes_of_booleans_that_are_neither_0_nor_1():
    """As a program gets them by `Tensor.view`, or from other libraries."""

    def body(rank, n):
        for op in (OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX, *BITWISE):
            for count in (5, 100_003):
                odd = [
                    torch.from_numpy(oracle.odd_booleans(r, count)[0].view("u1")) for r in range(n)
                ]
                x = odd[rank].clone().view(torch.bool)
                dist.all_reduce(x, op)
                true = [part != 0 for part in odd]
                named = {OP.SUM: operator.or_, OP.PRODUCT: operator.and_}
                named |= {OP.MIN: operator.and_, OP.MAX: operator.or_}
                want = functools.reduce(named.get(op) or FOLDS[op], true)
                assert torch.equal(x.view(torch.uint8), want.to(torch.uint8)), (op, count)

    run_group(3, body)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_reduce_of_every_type(n):
    def body(rank, n):
        for dtype, op in cases():
            x = given(dtype, rank)
            dist.all_reduce(x, op)
            assert x.dtype == dtype
            torch.testing.assert_close(x, expected(dtype, n, op), msg=f"{dtype} {op}")
            work = dist.all_reduce(y := given(dtype, rank), op, async_op=True)
            assert work.wait()
            assert torch.equal(x, y), f"{dtype} {op}"
        return len(list(cases()))

    assert run_group(n, body) == [len(list(cases()))] * n


@pytest.mark.parametrize("n", [2, 3])
def test_reduce_and_reduce_scatter_of_every_type(n):
    def body(rank, n):
        for dtype, op in cases():
            count = 5 * n
            whole = expected(dtype, n, op, count)
            for root in range(n):
                x = given(dtype, rank, count)
                dist.reduce(x, root, op)
                want = whole if rank == root else given(dtype, rank, count)
                torch.testing.assert_close(x, want, msg=f"{dtype} {op}")
            if dtype.is_complex:
                continue  # torch does not offer it
            out = torch.empty(5, dtype=dtype)
            dist.reduce_scatter_tensor(out, given(dtype, rank, count), op)
            torch.testing.assert_close(out, whole[5 * rank : 5 * rank + 5])
            dist.reduce_scatter(out, list(given(dtype, rank, count).split(5)), op)
            torch.testing.assert_close(out, whole[5 * rank : 5 * rank + 5])

    run_group(n, body)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 1000, 300_001])
def test_sizes_and_repetition(n, count):
    def body(rank, n):
        for turn in range(4):
            x = torch.arange(count, dtype=torch.float32) % 11 + rank + turn
            dist.all_reduce(x)
            assert torch.equal(x, n * (torch.arange(count) % 11 + turn) + n * (n - 1) / 2)
            out = torch.empty(count)
            dist.reduce_scatter_tensor(out, torch.full((n * count,), float(rank)))
            assert (out == n * (n - 1) / 2).all()

    run_group(n, body)


def test_premultiplied_sums():
    def body(rank, n):
        x = given(torch.float32, rank)
        op = dist._make_nccl_premul_sum(0.25)
        before = x.clone()
        dist.all_reduce(x, op)
        torch.testing.assert_close(x, 0.25 * expected(torch.float32, n, OP.SUM))
        out = torch.empty(3)
        factor = dist._make_nccl_premul_sum(torch.tensor([2.0]))
        dist.reduce_scatter_tensor(out, before[: 3 * n], factor)
        want = 2 * expected(torch.float32, n, OP.SUM)[3 * rank : 3 * rank + 3]
        torch.testing.assert_close(out, want)

    run_group(3, body)


def premul(factor):
    return dist._make_nccl_premul_sum(factor)


def double(value):
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_a_factor_of_another_type(dtype):
    def body(rank, n):
        for factor in (2.0, double(2.0), torch.tensor(2), torch.tensor([2], dtype=torch.int8)):
            memory = torch.full((64,), -7).to(dtype)
            x = memory[16:19]
            x.fill_(3)
            dist.all_reduce(x, premul(factor))
            out = memory[32:34]
            dist.reduce_scatter_tensor(out, torch.full((2 * n,), 5).to(dtype), premul(factor))
            assert x.tolist() == [6 * n] * 3
            assert out.tolist() == [10 * n] * 2
            untouched = torch.cat([memory[:16], memory[19:32], memory[34:]])
            assert (untouched == -7).all()

    run_group(2, body)


def test_factors_that_a_type_does_not_have():
    def body(rank, n):
        for dtype, factor in [
            (torch.int32, 0.5),
            (torch.int64, float("nan")),
            (torch.int64, double(float("inf"))),
            (torch.uint8, -1.0),
            (torch.int8, torch.tensor(300)),
            (torch.bool, 2.0),
            (torch.float32, torch.tensor(1j)),
        ]:
            x = torch.ones(5).to(dtype)
            with pytest.raises(ValueError, match=f"factor .* of PREMUL_SUM(.|\n)*{dtype}"):
                dist.all_reduce(x, premul(factor))
            assert (x == 1).all()
            dist.all_reduce(y := torch.ones(5))  # the group stays usable
            assert (y == n).all()

    run_group(2, body)


def test_tensors_that_are_not_contiguous():
    def body(rank, n):
        base = torch.zeros(6, 8)
        views = [base.t(), base[:, ::2], base[1:5, 2:3], base[0, 3], base.view(2, 3, 8)[:, 1]]
        for i, x in enumerate(views):
            base.fill_(-1)
            x.copy_(torch.arange(x.numel()).view(x.shape) + rank)
            outside = base.sum() - x.sum()
            work = dist.all_reduce(x, async_op=i % 2 == 1)
            if work is not None:
                work.wait()
            want = n * torch.arange(x.numel()).view(x.shape) + n * (n - 1) // 2
            assert torch.equal(x, want.to(x.dtype))
            assert base.sum() - x.sum() == outside
        out = torch.zeros(4, 2).t()
        dist.reduce_scatter_tensor(out, torch.arange(8.0 * n).view(4, 2 * n).t())
        want = n * torch.arange(8.0 * n).view(4, 2 * n).t()[2 * rank : 2 * rank + 2]
        assert torch.equal(out, want)
        for _ in range(2):  # a view that stands for minus what is in memory
            minus = torch.full((1,), 1j).conj().imag
            dist.all_reduce(minus)
            assert minus.item() == -n
        shaped = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        dist.all_reduce(shaped)
        assert (shaped == n).all()

    run_group(3, body)


def test_coalesced():
    def body(rank, n):
        xs = [torch.full((k,), float(rank + k)) for k in (1, 5, 100)]
        dist.all_reduce_coalesced(xs)
        for k, x in zip((1, 5, 100), xs, strict=True):
            assert (x == n * k + n * (n - 1) / 2).all()
        ys = [torch.full((k,), float(rank)) for k in (3, 4)]
        outs = [torch.empty(2), torch.empty(3)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for y in ys:
                dist.all_reduce(y)
        manager.wait()
        assert all((y == n * (n - 1) / 2).all() for y in ys)
        with dist._coalescing_manager():
            for out in outs:
                dist.reduce_scatter_tensor(out, torch.full((n * out.numel(),), float(rank)))
        assert all((out == n * (n - 1) / 2).all() for out in outs)

    run_group(2, body)


def test_uneven_lists():
    def body(rank, n):
        parts = [torch.arange(r + 1.0) + 10 * r + rank for r in range(n)]
        out = torch.empty(rank + 1)
        dist.reduce_scatter(out, parts)
        assert torch.equal(out, n * (torch.arange(rank + 1.0) + 10 * rank) + n * (n - 1) / 2)
        mask = torch.empty(rank + 1, dtype=torch.bool)
        dist.reduce_scatter(mask, [p > 10 * r + 1 for r, p in enumerate(parts)], OP.MAX)
        assert torch.equal(mask, torch.arange(rank + 1.0) + n - 1 > 1)

    run_group(3, body)


def test_all_ranks_have_the_same_bits():
    def body(rank, n):
        torch.manual_seed(rank)
        x = torch.randn(10_000)
        dist.all_reduce(x)
        return x.numpy().tobytes()

    first, *others = run_group(4, body)
    assert all(other == first for other in others)


def test_what_is_refused():
    def body(rank, n):
        refused = [
            (lambda: dist.all_reduce(torch.eye(3).to_sparse_csr()), "sparse"),
            (lambda: dist.all_reduce(torch.ones(3), OP.BXOR), "BXOR|XOR"),
            (lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), OP.AVG), "AVG"),
            (lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fnuz)), "float8"),
            (lambda: dist.all_reduce(torch.ones(3, device="meta")), "meta"),
            (lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(4)), "times as many"),
        ]
        for call, text in refused:
            with pytest.raises(dist.DistBackendError, match=text):
                call()
            x = torch.ones(2)
            dist.all_reduce(x)
            assert (x == n).all()
        if rank == 0:  # and the others hear of it
            with pytest.raises(ValueError, match="sparse"):
                dist.all_reduce(torch.eye(3).to_sparse_csr())
        else:
            with pytest.raises(dist.DistBackendError, match=r"PeerRejected(.|\n)*sparse"):
                dist.all_reduce(torch.ones(3))
        x = torch.ones(2)
        dist.all_reduce(x)
        assert (x == n).all()

    run_group(2, body)


@pytest.mark.timeout(300)
def test_calls_are_seen_by_the_profiler():
    """Also those that have been made before, and those in the background; with shapes and group."""
    pytest.importorskip("sympy")  # which the profiler imports: once, not on each rank

    def body(rank, n):
        x, blocks = torch.ones(5, 3), [torch.zeros(2) for _ in range(n)]
        dist.all_reduce(x)
        own = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[own], record_shapes=True) as trace:
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
            dist.broadcast(x[0], 0)
            dist.all_gather(blocks, torch.ones(2))
            dist.barrier()
        with tempfile.TemporaryDirectory() as folder:
            trace.export_chrome_trace(f"{folder}/trace.json")
            with open(f"{folder}/trace.json") as file:
                events = json.load(file)["traceEvents"]
        seen = [e for e in events if e.get("name", "").startswith("pycoll:")]
        assert {e["args"]["Group size"] for e in seen} == {n}
        assert {e["args"]["Rank"] for e in seen} == {rank}
        return sorted((e["name"], str(e["args"].get("Input Dims"))) for e in seen)

    want = [
        ("pycoll:all_gather", "[[2], [2]]"),
        ("pycoll:all_reduce", "[[5, 3]]"),
        ("pycoll:all_reduce", "[[5, 3]]"),
        ("pycoll:barrier", "None"),
        ("pycoll:broadcast", "[[3]]"),
    ]
    assert run_group(2, body, timeout=120, limit_s=60) == [want] * 2
