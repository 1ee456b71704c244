"""The methods that servers call, without a server."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from pycoll.torch import BackendArgumentError  # noqa: E402
from pycoll.torch.inference import CpuCommunicator  # noqa: E402
from worlds_torch import run_group  # noqa: E402


def parts_of(n, *shape, dtype=torch.float32):
    """Whole numbers that tell where they come from."""
    count = torch.Size(shape).numel()
    return [(torch.arange(count) + 7 * r).view(shape).to(dtype) for r in range(n)]


@pytest.mark.parametrize("n", [2, 3])
def test_every_method(n):
    def body(rank, n):
        comm = CpuCommunicator(dist.group.WORLD, unique_name="tp:0")
        assert (comm.rank_in_group, comm.world_size, comm.ranks) == (rank, n, list(range(n)))
        parts = parts_of(n, 2, 3 * n, 4)
        x = parts[rank].clone()
        assert comm.all_reduce(x) is x
        assert torch.equal(x, sum(parts))
        for dim in (0, 1, 2, -1, -2):
            assert torch.equal(comm.all_gather(parts[rank], dim), torch.cat(parts, dim))
            for dst in range(n):
                got = comm.gather(parts[rank], dst, dim)
                assert torch.equal(got, torch.cat(parts, dim)) if rank == dst else got is None
        got = comm.reduce_scatter(parts[rank], 1)
        assert got.is_contiguous()
        assert torch.equal(got, sum(parts).chunk(n, 1)[rank])
        sizes = [n + r for r in range(n)]
        rows = [part[: sizes[r]] for r, part in enumerate(parts_of(n, 3 * n, 4))]
        for known in (sizes, None):
            assert torch.equal(comm.all_gatherv(rows[rank], 0, known), torch.cat(rows))
        both = comm.all_gatherv([rows[rank], 2 * rows[rank]], 0, sizes)
        assert torch.equal(both[1], 2 * torch.cat(rows))
        assert torch.equal(both[0], torch.cat(rows))
        wide = parts_of(n, 2, sum(sizes))
        got = comm.reduce_scatterv(wide[rank], -1, sizes)
        assert torch.equal(got, sum(wide).split(sizes, 1)[rank])
        assert torch.equal(comm.broadcast(parts[rank].clone(), n - 1), parts[n - 1])
        comm.barrier()
        comm.destroy()

    run_group(n, body)


def test_messages():
    def body(rank, n):
        comm = CpuCommunicator(dist.group.WORLD)
        x = parts_of(n, 3, 5, dtype=torch.bfloat16)
        given = {
            "hidden": x[rank],
            "step": 3,
            "none": torch.empty(0, 4, dtype=torch.int32),
            "names": ["a", None, 1.5],
            "side": x[rank].t(),
        }
        if rank == 0:
            comm.send(x[0])
            comm.send_tensor_dict(given, 1)
            return comm.recv_tensor_dict()["side"].tolist() == x[1].t().tolist()
        got = comm.recv(torch.Size([3, 5]), torch.bfloat16)
        found = comm.recv_tensor_dict(0)
        comm.send_tensor_dict(given)
        assert torch.equal(got, x[0])
        assert list(found) == list(given)
        assert found["none"].shape == (0, 4)
        assert found["none"].dtype is torch.int32
        return torch.equal(found["hidden"], x[0]) and found["names"] == ["a", None, 1.5]

    assert run_group(2, body) == [True, True]


def test_groups_of_some_ranks():
    def body(rank, n):
        groups = [dist.new_group([2, 0]), dist.new_group([1, 2])]
        out = []
        for group in groups:
            if dist.get_rank(group) >= 0:
                comm = CpuCommunicator(group)
                if comm.rank == 0:
                    comm.send_tensor_dict({"x": torch.tensor([rank])})
                else:
                    out.append(comm.recv_tensor_dict()["x"].item())
                out.append(comm.gather(torch.tensor([rank]), 1, 0))
        return [x if x is None or isinstance(x, int) else x.tolist() for x in out]

    assert run_group(3, body) == [[None], [None], [0, [0, 2], 1, [1, 2]]]


def test_what_is_no_dictionary_of_tensors():
    def body(rank, n):
        comm = CpuCommunicator(dist.group.WORLD)
        for bad in ({"f": print}, {"t": (1, 2)}, {1: "one"}):
            with pytest.raises(BackendArgumentError):
                comm.send_tensor_dict(bad)

    run_group(1, body)
