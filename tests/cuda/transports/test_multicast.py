"""Sums and copies over a multicast address: who may have one, what is refused, and the arithmetic.

The host machine has an address that stands for the heaps of several processes. What a switch does
is not there: see docs/cuda.md.
"""

import numpy as np
import pytest

import oracle
from cuda.host_cupy import DeviceArray
from pycoll.config import Config
from pycoll.cuda.device.library import MULTICAST, MULTICAST_SUM, VMM, DeviceInfo
from pycoll.cuda.transports.multicast import Member, refusal
from pycoll.errors import ArgumentError
from pycoll.testing import run_processes

COUNT = 140_003  # too many for packets


def member(**changes):
    return Member(True, True, 4, b"a", b"")._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": b"b"}, ""),
        ({"device": b"b", "wanted": False}, "PYCOLL_CUDA_MULTICAST=1 is not set on all ranks"),
        ({"device": b"b", "supported": False}, "a device has no multicast"),
        ({}, "ranks share a device"),
        ({"device": b"b", "nbytes": 8}, "heaps differ in size"),
    ],
)
def test_who_may_have_it(changes, why):
    assert refusal([member(), member(**changes)]).startswith(why)
    assert bool(refusal([member(), member(**changes)])) == bool(why)
    assert refusal([member()]) == "there is one rank"


def run(n, rank, **settings):
    config = {"cuda_multicast": True, "device_heap_bytes": 4 << 20, **settings}
    return run_processes(n, rank, config=Config(timeout_s=15, heap_bytes=1 << 28, **config))


@pytest.fixture
def devices(host_kernels):
    """Return a function that gives a rank a device of its own, which has multicast."""
    host_kernels.vmm(VMM | MULTICAST)

    def own(comm):
        info = DeviceInfo()
        info.uuid[0] = comm.rank
        host_kernels.device = lambda index: info

    return own


def symmetric(comm, values):
    x = comm.empty(values.shape, values.dtype, device="cuda")
    x._values[:] = values
    return x


def kernel_of(comm):
    """Return the name of the kernel for the newest call, as it is launched, and why not else."""
    transport = comm._session.device.transport
    spec = next(reversed(transport._calls._calls))
    return transport._calls.info(spec, MULTICAST_SUM).kernel.decode(), transport.multicast.why


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [2, 3])
def test_sums(devices, host_kernels, n, name):
    """In place or not, with tails that fill no pack, and where arrays lie at different places."""
    parts = [oracle.exact(np.random.default_rng(r), name, COUNT) for r in range(n)]
    want = oracle.reduce(parts, "sum", "tree")

    def rank(comm):
        devices(comm)
        methods, call = [], host_kernels.call

        def note(name, *rest):
            methods.extend([rest[5]] if name == "launch" else [])
            return call(name, *rest)

        host_kernels.call = note
        x, y = (symmetric(comm, parts[comm.rank]) for _ in "xy")
        total = comm.all_reduce(x, out=y, order="any")
        comm.all_reduce(x, out=x, order="any")
        assert oracle.differences(total.get(), want) == ""
        assert oracle.differences(x.get(), want) == ""
        kernel, why = kernel_of(comm)
        assert why == ""
        assert kernel.startswith("multicast")
        assert methods == [MULTICAST_SUM] * 2
        small = DeviceArray(np.full(33, comm.rank + 1, name))  # outside the heap, on one rank
        if comm.rank == 0:
            small = symmetric(comm, np.full(33, 1, name))
        comm.all_reduce(small, out=small, order="any")
        assert (small.get().astype("f4") == n * (n + 1) / 2).all()
        methods.pop()
        shifted = comm.empty(4096 * comm.rank + 1, "u1", device="cuda")
        z = symmetric(comm, parts[comm.rank])
        comm.all_reduce(z, out=z, order="any")
        assert oracle.differences(z.get(), want) == ""
        del shifted
        x._values[:] = parts[comm.rank]
        comm.all_reduce(x, out=x)  # an order is promised
        assert oracle.differences(x.get(), want) == ""
        return methods[3:]

    assert run(n, rank) == [[0]] * n


@pytest.mark.parametrize("n", [2, 3])
def test_all_gather(devices, host_kernels, n):
    """In place or not, with tails that fill no pack, and where arrays lie at different places."""
    want = np.concatenate([np.arange(COUNT, dtype="i4") + rank for rank in range(n)])

    def rank(comm):
        devices(comm)
        kernels, me = [], comm.rank

        def gather(x, out):
            out._values[:] = -1
            x._values[:] = want[me * COUNT : (me + 1) * COUNT]
            comm.all_gather(x, out=out)
            assert (out.get() == want).all()
            kernels.append(kernel_of(comm)[0])

        x, out = symmetric(comm, np.zeros(COUNT, "i4")), symmetric(comm, 0 * want)
        gather(x, out)
        gather(out[me * COUNT : (me + 1) * COUNT], out)
        shifted = comm.empty(4096 * me + 1, "u1", device="cuda")
        gather(x, symmetric(comm, 0 * want))
        del shifted
        return kernels

    assert run(n, rank, device_heap_bytes=16 << 20) == [["multicast move"] * 3] * n


def test_what_is_no_sum_of_these_types(devices):
    def rank(comm):
        devices(comm)
        kernels = []
        for kind, op in (("int32", "sum"), ("float64", "sum"), ("float32", "avg")):
            x = symmetric(comm, np.ones(COUNT, kind))
            comm.all_reduce(x, op, out=x, order="any")
            assert (x.get() == (1 if op == "avg" else comm.world_size)).all()
            kernels.append(kernel_of(comm)[0].split()[0])
        return kernels

    for kernels in run(2, rank):
        assert set(kernels) <= {"two_shot", "low_latency"}


@pytest.mark.parametrize("what", ["setting", "device", "create", "open", "add", "bind"])
def test_a_rank_that_is_refused_keeps_all_from_it(devices, host_kernels, what):
    """At whatever step; the call goes on without, and nobody waits."""
    broken = {"create": 0, "open": 1, "add": 1, "bind": 0}

    def rank(comm):
        if what != "device":
            devices(comm)
        call, owned = host_kernels.call, len(host_kernels.owned)

        def refuse(name, *rest):
            if name == f"multicast_{what}" and comm.rank == broken.get(what):
                raise ArgumentError("refused")
            return call(name, *rest)

        host_kernels.call = refuse
        x = symmetric(comm, np.full(COUNT, comm.rank + 1, "f4"))
        comm.all_reduce(x, out=x, order="any")
        assert (x.get() == 6).all()
        kernel, why = kernel_of(comm)
        assert comm._session.device.transport.multicast.address == 0
        assert len(host_kernels.owned) - owned == 4  # the heap and cells, and what peers have
        return kernel.split()[0], why

    step = "add" if what == "open" else what
    why = {
        "setting": "PYCOLL_CUDA_MULTICAST=1 is not set on all ranks",
        "device": "ranks share a device",
    }.get(what, f"a rank was refused: {step}")
    assert run(3, rank, cuda_multicast=what != "setting") == [("two_shot", why)] * 3


def test_the_setting():
    assert Config.from_env({"PYCOLL_CUDA_MULTICAST": "1"}).cuda_multicast
    assert not Config().cuda_multicast
    with pytest.raises(ArgumentError, match="expected 0 or 1"):
        Config.from_env({"PYCOLL_CUDA_MULTICAST": "yes"})
