"""Tensors of CUDA devices in process groups, as far as a machine without one can tell.

Ranks are threads, kernels are those of the device library compiled for the host, and tensors lie in
host memory but say that they do not. What PyTorch's own streams do is not seen here.
"""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from cuda.conftest import host_kernels, host_library_path  # noqa: F401 - fixtures
from cuda.memory_wire import Binding
from device_tensors import Cuda, DeviceTensor, on_device
from pycoll.config import Config
from pycoll.cuda.transports import nccl
from pycoll.testing import run_processes, run_threads
from pycoll.torch.backend.group import ProcessGroupPycoll
from pycoll.torch.tensors import devices
from pycoll.torch.tensors import layout as tensors

PEERS = Config(timeout_s=10, heap_bytes=1 << 28, device_heap_bytes=1 << 20)
MESSAGES = Config(timeout_s=10, heap_bytes=1 << 28, device_transport="nccl")
N = 3
SUITE = Path(__file__).resolve().parents[3] / "benchmarks/gpu"


@pytest.fixture(params=["peers", "messages"])
def groups(request, host_kernels, monkeypatch):  # noqa: F811
    """Return a function that runs a function on ranks with a process group."""
    monkeypatch.setattr(nccl, "find_binding", lambda: Binding)
    monkeypatch.setattr(nccl, "environment", dict)
    streams = Cuda()
    for module in (devices, tensors):
        monkeypatch.setattr(module, "cuda", streams)
    monkeypatch.setattr(Cuda, "notes", [])
    config = PEERS if request.param == "peers" else MESSAGES

    def run(fn, n=N):
        def rank(comm):
            group = ProcessGroupPycoll(comm._session, None, "devices")
            result = fn(group, comm.rank)
            group.shutdown()
            return result

        return run_threads(n, rank, config=config)

    return run


def options(kind, **fields):
    """Make PyTorch's options of a call."""
    made = getattr(c10d, f"{kind}Options")()
    for name, value in {"asyncOp": False, **fields}.items():
        setattr(made, name, value)
    return made


def numbers(count, rank, dtype=torch.float32):
    """Return a tensor that tells the rank and the place of each element."""
    return on_device((torch.arange(count) % 50 + rank).to(dtype))


def values(tensor):
    """Return what a tensor of the device holds."""
    assert isinstance(tensor, DeviceTensor)
    return tensor.cpu()


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 1001, 40000])
def test_all_reduce(groups, dtype, count):
    def rank(group, r):
        x = numbers(count, r, dtype)
        group.allreduce([x], options("Allreduce"))
        return values(x)

    parts = [numbers(count, r, dtype).cpu() for r in range(N)]
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize <= 2 else dtype
    want = torch.stack([part.to(wide) for part in parts]).sum(0).to(dtype)
    for total in groups(rank):
        assert total.dtype == dtype
        assert torch.equal(total.to(wide), want.to(wide))


def test_types_that_are_not_numbers(groups):
    def rank(group, r):
        mask = on_device(torch.tensor([True, False, r == 1]))
        group.broadcast([mask], options("Broadcast", rootRank=1))
        wave = on_device(torch.full((5,), 1 + r * 1j))
        group.allreduce([wave], options("Allreduce"))
        scaled = numbers(4, r)
        factor = dist._make_nccl_premul_sum(2.0)
        group.allreduce([scaled], options("Allreduce", reduceOp=factor))
        small = (torch.arange(4.0) * (r == 2)).to(torch.float8_e4m3fnuz)
        group.broadcast([on_device(small)], options("Broadcast", rootRank=2))
        return [values(t).tolist() for t in (mask, wave, scaled)], small.float().tolist()

    want = ([[True, False, True], [3 + 3j] * 5, [6.0, 12.0, 18.0, 24.0]], [0.0, 1.0, 2.0, 3.0])
    assert groups(rank) == [want] * N


BASE = torch.arange(6.0)
EACH = [(BASE + r).tolist() for r in range(N)]


def zeros(count):
    """Return a tensor of the device to receive."""
    return on_device(torch.zeros(count))


def test_single_tensors(groups):
    """With blocks that are equal, and with blocks that are not, which go through the host."""

    def rank(group, r):
        x, box, total = numbers(6, r), numbers(6, r), numbers(6, r)
        part, whole, turned, uneven = zeros(2), zeros(18), zeros(6), zeros(3 * r)
        group.broadcast([box], options("Broadcast", rootRank=1))
        group.reduce([total], options("Reduce", rootRank=0))
        group.reduce_scatter_single(part, x, options("ReduceScatter"))
        group.all_gather_single(whole, x, options("Allgather"))
        group.all_to_all_single(turned, x, [], [], options("AllToAll"))
        given = on_device(torch.arange(3.0) + 10 * r)
        group.all_to_all_single(uneven, given, [r] * N, [0, 1, 2], options("AllToAll"))
        return [values(t).tolist() for t in (box, total, part, whole, turned, uneven)]

    for r, got in enumerate(groups(rank)):
        two = slice(2 * r, 2 * r + 2)
        assert got == [
            (BASE + 1).tolist(),
            (3 * BASE + 3).tolist() if r == 0 else EACH[r],
            (3 * BASE + 3)[two].tolist(),
            [v for row in EACH for v in row],
            [v for row in EACH for v in row[two]],
            [10.0 * k + [0, 0, 1][r] + i for k in range(N) for i in range(r)],
        ]


def test_lists_of_tensors(groups):
    """Of tensors of one size, and of different sizes, which go through the host."""

    def rank(group, r):
        x, sums, mine = numbers(6, r), zeros(r + 1), zeros(6)
        parts = [zeros(6) for _ in range(N)]
        ragged = [zeros(k + 1) for k in range(N)]
        turned = [zeros(r + 1) for _ in range(N)]
        at_root = [[zeros(6) for _ in range(N)]] if r == 1 else []
        shares = [numbers(k + 1, r) for k in range(N)]
        group.allgather([parts], [x], options("Allgather"))
        group.allgather([ragged], [numbers(r + 1, r)], options("Allgather"))
        group.reduce_scatter([sums], [shares], options("ReduceScatter"))
        group.alltoall(turned, shares, options("AllToAll"))
        group.gather(at_root, [x], options("Gather", rootRank=1))
        given = [[numbers(6, 10 * k) for k in range(N)]] if r == 2 else []
        group.scatter([mine], given, options("Scatter", rootRank=2))
        rows = [parts, ragged, [sums], turned, [t for row in at_root for t in row], [mine]]
        return [[values(t).tolist() for t in row] for row in rows]

    for r, got in enumerate(groups(rank)):
        assert got == [
            EACH,
            [[float(k + i) for i in range(k + 1)] for k in range(N)],
            [[3.0 * i + 3 for i in range(r + 1)]],
            [[float(k + i) for i in range(r + 1)] for k in range(N)],
            EACH if r == 1 else [],
            [(BASE + 10 * r).tolist()],
        ]


def test_messages_between_two_ranks(groups):
    def rank(group, r):
        x = numbers(300, r)
        if r == 0:
            group.send([x], 1, 5).wait()
        elif r == 1:
            group.recv([x], 0, 5).wait()
        return values(x).tolist()

    got = groups(rank)
    assert got[0] == got[1] != got[2]


def test_who_waits_for_whom(groups):
    """A call in the background: its stream behind the caller's, and who waits behind that."""

    def rank(group, r):
        x = numbers(100, r)
        work = group.allreduce([x], options("Allreduce", asyncOp=True))
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        return values(x).tolist()

    assert groups(rank, 1) == [numbers(100, 0).tolist()]
    side = Cuda.made
    assert [n for n in Cuda.notes if n[0] != "keep"] == [
        ("record", 7),
        ("wait", side, 7),
        ("record", side),
        ("wait", 7, side),
    ]


def test_a_buffer_is_kept_until_its_copy_is_done(groups):
    def rank(group, r):
        x = on_device(torch.arange(12.0).view(3, 4).t())  # not contiguous: received beside it
        group.allreduce([x], options("Allreduce"))
        return values(x).tolist()

    want = (N * torch.arange(12.0).view(3, 4).t()).tolist()
    assert groups(rank) == [want] * N
    assert [n for n in Cuda.notes if n[0] == "keep"] == [("keep", 7)] * N


def test_barrier_waits_for_the_device(groups):
    def rank(group, r):
        group.barrier(options("Barrier"))
        before = list(Cuda.notes)
        group.allreduce([numbers(3, r)], options("Allreduce"))
        group.barrier(options("Barrier"))
        return [n for n in before if n[0] == "synchronize"]

    assert groups(rank) == [[]] * N
    assert Cuda.notes.count(("synchronize", 0)) == N


def test_arguments_that_do_not_fit(groups):
    """Errors on every rank, nothing is launched, and the group stays usable."""

    def rank(group, r):
        texts = []
        good = numbers(6, r)
        cases = [
            lambda: group.all_gather_single(torch.zeros(18), good, options("Allgather")),
            lambda: group.all_gather_single(on_device(torch.zeros(17)), good, options("Allgather")),
            lambda: group.allreduce([good if r else numbers(5, r)], options("Allreduce")),
        ]
        for case in cases:
            with pytest.raises(dist.DistBackendError) as caught:
                case()
            texts.append(str(caught.value))
        group.allreduce([good], options("Allreduce"))
        return texts, values(good).tolist()

    for texts, total in groups(rank):
        assert total == (3 * torch.arange(6.0) + 3).tolist()
        for text, part in zip(texts, ("host memory", "expected 3 times", "count"), strict=True):
            assert part in text


def test_a_device_that_is_not_there(monkeypatch):
    """Without CuPy or a device: the error says what to do, on every rank."""
    monkeypatch.setattr(devices, "cuda", Cuda())

    def rank(comm):
        group = ProcessGroupPycoll(comm._session, None, "devices")
        with pytest.raises(dist.DistBackendError, match=r"pycoll doctor") as caught:
            group.allreduce([numbers(4, comm.rank)], options("Allreduce"))
        x = torch.ones(3)
        group.allreduce([x], options("Allreduce"))
        return x.tolist(), "all_reduce on rank" in str(caught.value)

    assert run_threads(2, rank, config=PEERS) == [([2.0] * 3, True)] * 2


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # names that 2.8 has, too
@pytest.mark.parametrize("wrong", [False, True])
def test_the_suite_for_a_device_on_tensors_of_the_cpu(monkeypatch, wrong):
    """It finds no difference between equal things, and one where there is one."""
    monkeypatch.syspath_prepend(str(SUITE))

    def rank(comm):
        import torch_group

        torch.set_num_threads(1)  # the parent's other threads are not here
        rows, real = [], torch_group.operations
        turns = iter(range(1000))
        if wrong:
            monkeypatch.setattr(torch_group, "operations", lambda x: real(x + next(turns) % 2))
        torch_group.join(comm)
        torch_group.check("cpu", lambda name, good, **facts: rows.append((name, good)))
        dist.destroy_process_group()
        return rows

    for rows in run_processes(2, rank, timeout=60):
        assert len(rows) == 1 + 12 * 11
        assert {good for name, good in rows if name != "DDP"} == {not wrong}
        assert rows[-1] == ("DDP", True)
