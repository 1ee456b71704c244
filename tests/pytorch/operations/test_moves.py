"""Operations that move tensors, sub-groups and objects, through torch.distributed."""

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from worlds_torch import run_group  # noqa: E402

DTYPES = [torch.bool, torch.int8, torch.int16, torch.int64, torch.uint16, torch.float16]
DTYPES += [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
MORE = [torch.float8_e4m3fn, torch.float8_e5m2]


def block(dtype, rank, count):
    """`count` elements that tell their rank and place."""
    values = torch.arange(count) * 3 + rank * 5 + 1
    if dtype is torch.bool:
        return values % 2 == 0
    return (values % 100).to(torch.float32).to(dtype)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_type(n):
    def body(rank, n):
        for dtype in DTYPES:
            for count in (0, 1, 13, 5000):
                mine, blocks = block(dtype, rank, count), [block(dtype, r, count) for r in range(n)]
                whole = torch.cat(blocks)
                for root in range(n):
                    x = mine.clone()
                    dist.broadcast(x, root)
                    assert torch.equal(x, blocks[root])
                got = torch.empty_like(whole)
                dist.all_gather_into_tensor(got, mine)
                assert torch.equal(got, whole)
                parts = [torch.empty_like(mine) for _ in range(n)]
                dist.all_gather(parts, mine)
                assert all(map(torch.equal, parts, blocks))
                root = n - 1
                parts = [torch.empty_like(mine) for _ in range(n)] if rank == root else None
                dist.gather(mine, parts, root)
                assert rank != root or all(map(torch.equal, parts, blocks))
                x = torch.empty_like(mine)
                dist.scatter(x, blocks if rank == root else None, root)
                assert torch.equal(x, mine)
        for dtype in MORE:
            x = block(dtype, rank, 7)
            dist.broadcast(x, n - 1)
            assert torch.equal(x.float(), block(dtype, n - 1, 7).float())

    run_group(n, body)


def cell(source, target, count, dtype=torch.float32):
    return (torch.arange(count) + 100 * source + 10 * target).to(dtype)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_to_all(n):
    def body(rank, n):
        for dtype in (torch.int16, torch.bfloat16, torch.float64, torch.complex64):
            x = torch.cat([cell(rank, r, 4, dtype) for r in range(n)])
            want = torch.cat([cell(r, rank, 4, dtype) for r in range(n)])
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x)
            assert torch.equal(out, want)
            outs = [torch.empty(4, dtype=dtype) for _ in range(n)]
            dist.all_to_all(outs, list(x.split(4)))
            assert torch.equal(torch.cat(outs), want)
            dist.all_to_all_single(x, x)  # in place
            assert torch.equal(x, want)
        sizes = [[(r + 2 * q) % 4 for q in range(n)] for r in range(n)]  # some are 0
        send, receive = sizes[rank], [sizes[r][rank] for r in range(n)]
        x = torch.cat([cell(rank, r, 2 * k) for r, k in enumerate(send)]).view(-1, 2)
        want = torch.cat([cell(r, rank, 2 * k) for r, k in enumerate(receive)]).view(-1, 2)
        out = torch.empty_like(want)
        work = dist.all_to_all_single(out, x, receive, send, async_op=True)
        work.wait()
        assert torch.equal(out, want)
        outs = [torch.empty(k, 2) for k in receive]
        dist.all_to_all(outs, list(x.split(send)))
        assert torch.equal(torch.cat(outs), want)

    run_group(n, body)


def test_uneven_and_coalesced_gathers():
    def body(rank, n):
        parts = [torch.empty(r + 1, 2) for r in range(n)]
        dist.all_gather(parts, torch.full((rank + 1, 2), float(rank)))
        assert all((part == r).all() for r, part in enumerate(parts))
        outs = [torch.empty(n * 2), torch.empty(n, 3)]
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(outs[0], torch.full((2,), float(rank)))
            dist.all_gather_into_tensor(outs[1], torch.full((1, 3), float(rank)))
        assert torch.equal(outs[0].view(n, 2)[:, 1], torch.arange(float(n)))
        assert torch.equal(outs[1][:, 0], torch.arange(float(n)))
        group = dist.group.WORLD
        rows = [[torch.empty(2), torch.empty(3)] for _ in range(n)]
        group.allgather_coalesced(rows, [torch.full((k,), float(rank)) for k in (2, 3)]).wait()
        assert all((t == r).all() for r, row in enumerate(rows) for t in row)

    run_group(3, body)


def test_in_place_and_not_contiguous():
    def body(rank, n):
        whole = torch.full((n, 40), -1.0)
        whole[rank] = rank
        dist.all_gather_into_tensor(whole, whole[rank])
        assert torch.equal(whole, torch.arange(float(n))[:, None].expand(n, 40))
        base = torch.zeros(4, 6)
        x = base[:, 1:3]
        x.copy_(torch.full_like(x, float(rank)))
        dist.broadcast(x, n - 1)
        assert (x == n - 1).all()
        assert base.sum() == x.sum()
        parts = [torch.zeros(4, 6).t()[1:3] for _ in range(n)]
        dist.all_gather(parts, torch.full((4, 2), float(rank)).t())
        assert all((part == r).all() for r, part in enumerate(parts))
        parameter = torch.nn.Parameter(torch.full((5,), float(rank)))
        dist.broadcast(parameter.t(), 0)
        dist.broadcast(parameter, 0)
        assert (parameter == 0).all()

    run_group(3, body)


def test_objects():
    def body(rank, n):
        mine = {"rank": rank, "text": "x" * (10 ** (rank + 1))}
        objects = [None] * n
        dist.all_gather_object(objects, mine)
        assert [o["rank"] for o in objects] == list(range(n))
        box = [mine, rank]
        dist.broadcast_object_list(box, src=1)
        assert box[1] == 1
        gathered = [None] * n if rank == 0 else None
        dist.gather_object(mine, gathered, dst=0)
        assert rank or [len(o["text"]) for o in gathered] == [10 ** (r + 1) for r in range(n)]
        out = [None]
        dist.scatter_object_list(out, [f"for {r}" for r in range(n)] if rank == 2 else None, src=2)
        assert out == [f"for {rank}"]
        if rank == 0:
            dist.send_object_list([mine, 7], dst=1)
        elif rank == 1:
            got = [None, None]
            dist.recv_object_list(got, src=0)
            assert got[1] == 7

    run_group(3, body)


def test_sub_groups():
    def body(rank, n):
        low = dist.new_group([0, 1])
        high = dist.new_group([3, 2, 1], group_desc="high")
        x = torch.tensor([float(rank)])
        if rank < 2:
            dist.all_reduce(x, group=low)
            assert x == 1
        else:
            assert dist.get_rank(low) == -1
        if rank > 0:
            assert dist.get_world_size(high) == 3
            y = torch.tensor([float(rank)])
            dist.broadcast(y, src=2, group=high)
            assert y == 2
            dist.all_reduce(y, group=high)
            assert y == 6
        mine, _ = dist.new_subgroups(2)
        z = torch.tensor([float(rank)])
        dist.all_reduce(z, group=mine)
        assert z == (1 if rank < 2 else 5)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert dist.get_backend(mesh.get_group("a")) == "pycoll"
        w = torch.tensor([float(rank)])
        dist.all_reduce(w, group=mesh.get_group("a"))
        assert w == 2 * (rank % 2) + 2
        dist.barrier()
        dist.destroy_process_group(mine)
        alone = dist.new_group([rank], use_local_synchronization=True)
        dist.all_reduce(w, group=alone)
        assert w == 2 * (rank % 2) + 2

    run_group(4, body)


def test_async_work():
    def body(rank, n):
        a, b = torch.full((9,), float(rank)), torch.full((9,), float(rank))
        first = dist.all_reduce(a, async_op=True)
        second = dist.broadcast(b, 1, async_op=True)
        c = torch.ones(3)
        dist.all_reduce(c)  # goes behind them
        assert first.is_completed()
        assert first.is_success()
        assert second.wait()
        assert (a == n * (n - 1) / 2).all()
        assert (b == 1).all()
        assert (c == n).all()
        assert first.result()[0] is a
        future = first.get_future()
        assert future.wait()[0] is a
        assert [w.get_future_result().wait() for w in (first, second)] == [0, 0]  # SUCCESS
        chained = dist.all_reduce(c, async_op=True).get_future().then(lambda f: f.value()[0] / n)
        assert (chained.wait() == n).all()
        for turn in range(200):
            works = [dist.all_reduce(torch.ones(turn + 1), async_op=True) for _ in range(3)]
            assert [w.get_future().wait()[0][0] for w in works] == [n] * 3
        dist.barrier(async_op=True).wait()

    run_group(3, body)


def test_an_asynchronous_call_returns_at_once():
    """However long the peers take, and whatever is queued already."""

    def body(rank, n):
        if rank == 1:
            dist.recv(torch.empty(1), 0)  # sent once all calls of rank 0 have returned
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(5)]
        out, parts = torch.empty(2 * n), [torch.empty(r + 1) for r in range(n)]
        works.append(dist.all_gather_into_tensor(out, torch.ones(2), async_op=True))
        works.append(dist.all_gather(parts, torch.ones(rank + 1), async_op=True))
        if rank == 0:
            assert not any(work.is_completed() for work in works)
            dist.send(torch.ones(1), 1)
        for work in works:
            work.wait()
        assert (out == 1).all()
        assert all((part == 1).all() for part in parts)

    run_group(2, body)


def test_a_second_life(tmp_path):
    """A group can be destroyed and made again in the same process."""

    def body(rank, n):
        for turn in range(3):
            x = torch.ones(4)
            dist.all_reduce(x)
            assert (x == n).all()
            work = dist.all_reduce(x, async_op=True)
            dist.barrier()
            dist.destroy_process_group()
            assert work.is_completed()
            store = dist.FileStore(str(tmp_path / str(turn)), n)
            dist.init_process_group("pycoll", store=store, rank=rank, world_size=n)

    run_group(2, body)


def test_subgroups():
    def body(rank, n):
        mine, _ = dist.new_subgroups(2)
        x = torch.tensor([rank])
        dist.all_reduce(x, group=mine)
        assert x.item() == (1 if rank < 2 else 5)
        for name, given in (("split_group", [[0, 1], [2, 3]]), ("shrink_group", [3])):
            if hasattr(dist, name):
                with pytest.raises((RuntimeError, TypeError)):  # PyTorch says what is missing
                    getattr(dist, name)(
                        **{"split_ranks" if name == "split_group" else "ranks_to_exclude": given}
                    )
        backend = mine._get_backend(torch.device("cpu"))
        assert dist.group.WORLD.options._timeout == timedelta(seconds=15)  # of `run_group`
        if hasattr(backend.options, "group_name"):
            assert backend.options.global_ranks_in_group == ([0, 1] if rank < 2 else [2, 3])
        assert not backend.supports_time_estimate
        x = torch.ones(1)
        dist.all_reduce(x)  # nothing is broken
        assert x.item() == n

    run_group(4, body)


@pytest.mark.parametrize("lists", [False, True])
def test_blocks_that_are_as_long_together_only(lists):
    """Rank 1 expects two elements of rank 0 and one of rank 2; they send one and two."""
    sizes = torch.tensor([[1, 1, 3], [2, 1, 1], [1, 2, 1]])

    def body(rank, n):
        sent, received = sizes[rank].tolist(), sizes[:, rank].tolist()
        wanted = [2, 1, 1] if rank == 1 else received
        x, out = torch.ones(sum(sent)), torch.full((sum(received),), -7.0)
        call, told = dist.all_to_all_single, (out, x, wanted, sent)
        if lists:
            call, told = dist.all_to_all, (list(out.split(wanted)), list(x.split(sent)))
        with pytest.raises(dist.DistBackendError, match=r"ranks send(.|\n)*which expects"):
            call(*told)
        assert rank != 1 or (out == -7).all()
        dist.all_to_all_single(out, x, received, sent)
        assert (out == 1).all()

    run_group(3, body)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("count", [5, 1000, 20_000, 120_000])
def test_all_to_all_in_place_again_and_again(n, count):
    """Also where later calls go the short way, on arrays that peers read in place."""

    def body(rank, n):
        want = torch.cat([cell(r, rank, count) for r in range(n)])
        for _ in range(8):
            x = torch.cat([cell(rank, r, count) for r in range(n)])
            dist.all_to_all_single(x, x)
            assert torch.equal(x, want)

    run_group(n, body)
