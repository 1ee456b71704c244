"""Coalesced calls that read what they write: every input is read as it was before the call."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from pycoll.torch.operations.arguments import unwritten  # noqa: E402
from worlds_torch import run_group  # noqa: E402


def plain(count, value=0.0):
    return torch.full((count,), value)


def symmetric(count, value=0.0):
    return dist.group.WORLD.allocate_tensor(count, dtype=torch.float32).fill_(value)


def sums(make):
    """Return tensors that come twice, in whole and in part, after they have been summed."""
    x, y, strided = make(4, 1.0), make(6, 1.0), make(8, 1.0).view(4, 2).t()
    options = dist.AllreduceCoalescedOptions()
    group = dist.group.WORLD
    for tensors in ([x, x, x], [y[:4], y[2:]], [strided, strided], [y, strided, y]):
        group.allreduce_coalesced(tensors, options).wait()
    return x.tolist() + y.tolist() + strided.flatten().tolist()


def gathers(make, rank, n):
    group = dist.group.WORLD
    a, b, c = make(2, rank + 1.0), make(2 * n, -1.0), make(2 * n * n)
    group.allgather_into_tensor_coalesced([b, c], [a, b]).wait()
    wide, d = make(8 * n, -1.0), make(4 * n)  # the first output is strided
    column = wide.view(2 * n, 4)[:, 1]
    group.allgather_into_tensor_coalesced([column, d], [a, wide[4:8]]).wait()
    return b.tolist(), c.tolist(), d.tolist()


def lists(make, rank, n):
    group = dist.group.WORLD
    a, b = make(2, rank + 1.0), make(2, -1.0 - rank)
    rows = [[b if r == 0 else make(2), make(2)] for r in range(n)]
    group.allgather_coalesced(rows, [a, b]).wait()
    return [[t[0].item() for t in row] for row in rows]


def scattered(make, rank, n):
    group = dist.group.WORLD
    whole, out = make(2 * n, 1.0), make(2)
    group.reduce_scatter_tensor_coalesced([whole[:2], out], [make(2 * n, 3.0), whole]).wait()
    return whole.tolist(), out.tolist()


@pytest.mark.parametrize("make", [plain, symmetric])
def test_inputs_are_read_before_outputs_are_written(make):
    def body(rank, n):
        assert sums(make)[:4] == [2.0] * 4
        b, c, d = gathers(make, rank, n)
        assert b == [1.0, 1.0, 2.0, 2.0]
        assert c == [-1.0] * 8
        assert d == [-1.0] * 8
        assert lists(make, rank, n) == [[1.0, -1.0], [2.0, -2.0]]
        assert scattered(make, rank, n) == ([6.0, 6.0, 1.0, 1.0], [2.0, 2.0])

    run_group(2, body)


def test_sums_of_tensors_that_come_twice():
    """Like gloo's, which reads all of them first."""

    def body(rank, n):
        return sums(plain)

    assert run_group(2, body) == run_group(2, body, backend="gloo")


def test_only_what_is_overwritten_is_copied():
    flat = torch.zeros(12)
    a, b, c = flat[:4], flat[4:8], flat[8:]
    apart = unwritten([a, b, c], [[a], [b], [c]], None)
    assert all(x is y for x, y in zip(apart, (a, b, c), strict=True))
    first, second, third = unwritten([a, b, c], [[c], [a, b[2:]], []], None)
    assert first is a
    assert second is b  # its own call may write there
    assert third is not c
    later, again = unwritten([a, flat[2:10]], [[flat[::3]], [b]], None)
    assert later is a
    assert again.data_ptr() != flat[2:].data_ptr()
    empty = flat[:0]
    assert unwritten([a, empty], [[a], [empty]], None)[1] is empty


SIZES = [3, 1, 700, 0, 40_000, 5, 2, 17, 30_000, 30_000, 9]
TYPES = [torch.float32] * 6 + [torch.bfloat16] * 2 + [torch.float32, torch.bfloat16, torch.int32]


def many(rank, rows=1, seed=0):
    torch.manual_seed(100 * seed + rank)
    sizes = zip(SIZES, TYPES, strict=True)
    return [(100 * torch.randn(rows * size)).to(dtype) for size, dtype in sizes]


def made(group):
    return group._caller.session.engine.iteration


def three_calls(group, rank, n, one_by_one):
    """Return all results of the three coalesced calls, and how often the engine was called."""
    sums, blocks, own = many(rank), many(rank, n, 1), many(rank, 1, 2)
    shares = [torch.full((len(b) // n,), -1, dtype=b.dtype) for b in blocks]
    wholes = [torch.full((len(b) * n,), -1, dtype=b.dtype) for b in own]
    begin = made(group)
    if one_by_one:
        for tensor, share, block, whole, mine in zip(
            sums, shares, blocks, wholes, own, strict=True
        ):
            dist.all_reduce(tensor, group=group)
            dist.reduce_scatter_tensor(share, block, group=group)
            dist.all_gather_into_tensor(whole, mine, group=group)
    else:
        group.allreduce_coalesced(sums, dist.AllreduceCoalescedOptions()).wait()
        group.reduce_scatter_tensor_coalesced(shares, blocks).wait()
        group.allgather_into_tensor_coalesced(wholes, own).wait()
    return [t.tolist() for t in (*sums, *shares, *wholes)], made(group) - begin


@pytest.mark.parametrize("n", [2, 3])
def test_small_tensors_share_a_call(n):
    def body(rank, n):
        group = dist.group.WORLD
        ours, few = three_calls(group, rank, n, one_by_one=False)
        want, all_calls = three_calls(group, rank, n, one_by_one=True)
        assert ours == want  # the same bits
        strided = torch.ones(6, 2).t()
        options = dist.AllreduceCoalescedOptions()
        leaves = [torch.ones(5, requires_grad=True) for _ in range(3)]
        group.allreduce_coalesced([strided, *[leaf.detach() for leaf in leaves]], options).wait()
        assert (strided == n).all()
        assert all((leaf == n).all() for leaf in leaves)
        begin = made(group)
        group.allreduce_coalesced([torch.ones(100) for _ in range(50)], options).wait()
        return few < all_calls, made(group) - begin

    assert run_group(n, body) == [(True, 1)] * n


def test_ranks_that_coalesce_other_sizes():
    def body(rank, n):
        tensors = [torch.ones(3), torch.ones(4 + rank)]
        with pytest.raises(dist.DistBackendError, match="MismatchError"):
            dist.group.WORLD.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
        return [t.sum().item() for t in tensors]

    assert run_group(2, body) == [[3.0, 4.0], [3.0, 5.0]]


def test_calls_collected_by_pytorch():
    """Without a device they are one call; with one they are refused, and later calls are made."""

    def body(rank, n):
        x, y = plain(3, rank + 1.0), plain(2, 1.0)
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as collected:
            dist.all_reduce(x)
            dist.all_reduce(y)
        collected.wait()
        refused = dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"))
        with pytest.raises(RuntimeError, match="do not collect calls of a device, here cpu"):
            refused.__enter__()
        dist.all_reduce(y)
        return x.tolist() + y.tolist()

    assert run_group(2, body) == [[3.0] * 3 + [4.0] * 2] * 2
