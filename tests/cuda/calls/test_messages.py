"""send and recv of device arrays between ranks of a communicator, and among virtual ranks."""

import ml_dtypes
import numpy as np
import pytest

import pycoll
from cuda.host_cupy import DeviceArray, Stream
from cuda.memory_wire import Binding
from pycoll import virtual_ranks
from pycoll.config import Config
from pycoll.cuda.transports import nccl
from pycoll.errors import ArgumentError, CollTimeout, MismatchError
from pycoll.testing import run_threads

WORLD = Config(timeout_s=10, heap_bytes=1 << 28, device_heap_bytes=1 << 23)
MESSAGES = Config(timeout_s=10, heap_bytes=1 << 28, device_transport="nccl")
SLOT = 32 << 10  # bytes, of 2 ranks; 64 of them


def connected(comm, heap=True):
    """Connect the devices of all ranks, and their heaps; return a function that makes arrays."""
    made = comm.empty(1, np.float32, device="cuda") if heap else DeviceArray(np.ones(1, "f4"))
    comm.all_reduce(made)

    def make(values, symmetric=False):
        values = np.asarray(values)
        if not symmetric:
            return DeviceArray(values.copy())
        array = comm.empty(values.shape, values.dtype, device="cuda")
        array._values[...] = values
        return array

    return make


@pytest.mark.parametrize("symmetric", [False, True])
def test_arrays_of_all_sizes_and_types(host_kernels, symmetric):
    sizes = (0, 1, 33, SLOT // 4, SLOT // 4 + 1, 65 * SLOT // 4 + 3)
    types = ("float32", "int8", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, "complex64")
    cases = [(size, "float32") for size in sizes] + [(1000, kind) for kind in types]

    def rank(comm):
        make, got = connected(comm), []
        for i, (size, kind) in enumerate(cases):
            x = np.arange(size).astype(kind)
            if comm.rank == 0:
                comm.send(make(x, symmetric), 1, tag=i)
            else:
                y = make(np.zeros_like(x), symmetric and i % 2)
                assert comm.recv(y, 0, tag=i) == 0
                got.append(y.get().tobytes() == x.tobytes())
        return got

    assert run_threads(2, rank, config=WORLD, timeout=60)[1] == [True] * len(cases)


def test_without_a_heap_large_arrays_go_through_slots(host_kernels):
    def rank(comm):
        make = connected(comm, heap=False)
        x = np.arange(70 * SLOT, dtype=np.uint8)
        if comm.rank == 0:
            comm.send(make(x, symmetric=True), 1)  # which the other rank has not mapped
            return True
        y = make(np.zeros_like(x))
        comm.recv(y, 0)
        return np.array_equal(y.get(), x)

    assert run_threads(2, rank, config=WORLD, timeout=60) == [True] * 2


@pytest.mark.parametrize("symmetric", [False, True])
def test_tags_and_sources_in_any_order(host_kernels, symmetric):
    n = 3

    def rank(comm):
        make = connected(comm)
        if comm.rank:
            works = [
                comm.isend(make(np.full(20_000, 10.0 * comm.rank + tag), symmetric), 0, tag)
                for tag in range(4)
            ]
            for work in works:
                work.wait()
            return all(work.done() for work in works)
        got, y = [], make(np.zeros(20_000))
        for src, tag in ((2, 3), (1, 2), (2, 0)):
            comm.recv(y, src, tag)
            got.append(y.get()[-1])
        for tag in (1, 1, pycoll.ANY, pycoll.ANY, pycoll.ANY):
            source = comm.recv(y, pycoll.ANY, tag)
            assert y.get()[0] // 10 == source
            got.append(y.get()[0])
        return got

    first, *others = run_threads(n, rank, config=WORLD, timeout=60)
    assert first[:3] == [23.0, 12.0, 20.0]
    assert sorted(first) == [10.0 * rank + tag for rank in (1, 2) for tag in range(4)]
    assert set(first[3:5]) == {11.0, 21.0}
    assert others == [True, True]


def test_in_the_background(host_kernels):
    def rank(comm):
        make, other = connected(comm), 1 - comm.rank
        xs = [
            make(np.full(size, comm.rank + i, float), i % 2)
            for i, size in enumerate((5, 30_000, 9))
        ]
        ys = [make(np.zeros(size)) for size in (5, 30_000, 9)]
        coming = [comm.irecv(y, other, tag) for tag, y in enumerate(ys)]
        going = [comm.isend(x, other, tag, stream=Stream(3)) for tag, x in enumerate(xs)]
        assert pycoll.wait_all(coming) == [other] * 3
        assert pycoll.wait_all(going) == [None] * 3
        assert all(work.done() for work in coming + going)
        going[1].synchronize()
        assert coming[1].synchronize() == other
        return [(y.get() == other + i).all() for i, y in enumerate(ys)]

    assert run_threads(2, rank, config=WORLD, timeout=60) == [[True] * 3] * 2


@pytest.mark.parametrize("symmetric", [False, True])
def test_sendrecv_along_a_ring(host_kernels, symmetric):
    n = 3

    def rank(comm):
        make, got = connected(comm), []
        for size in (4, 40_000):
            right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
            x, y = (make(np.full(size, comm.rank * k), symmetric) for k in (1, 0))
            assert comm.sendrecv(x, right, y, left) == left
            comm.sendrecv(y, right, y, left, stream=7)  # in its place
            got += [y.get()[0], y.get()[-1], x.get()[0]]
            comm.sendrecv(x, right if right else None, y, left if comm.rank else None)
            got.append(y.get()[0])
            comm.send(x, comm.rank)
            comm.recv(y, comm.rank)
            got.append((y.get() == comm.rank).all())
        return got

    for r, got in enumerate(run_threads(n, rank, config=WORLD, timeout=60)):
        twice = (r - 2) % n
        assert got == [twice, twice, r, r - 1 if r else twice, True] * 2


def test_what_does_not_fit_stays(host_kernels):
    def rank(comm):
        make = connected(comm)
        if comm.rank == 0:
            comm.send(make(np.arange(4.0)), 1, tag=3)
            comm.send(np.arange(5.0), 1, tag=4)
            return True
        for y in (np.zeros(5), np.zeros(4, np.int64)):
            with pytest.raises(
                MismatchError, match=r"has sent 32 bytes .* tag 3.* the message stays"
            ):
                comm.recv(make(y), 0, tag=3)
        work = comm.irecv(make(np.zeros(3)), 0, tag=3)
        assert work.done()
        with pytest.raises(MismatchError, match="the message stays"):
            work.wait()
        y = make(np.zeros(4))
        assert comm.recv(y, pycoll.ANY, pycoll.ANY) == 0
        assert y.get().tolist() == [0, 1, 2, 3]
        with pytest.raises(MismatchError, match="lies on a device, so what is sent has to"):
            comm.recv(make(np.zeros(5)), 0, tag=4)
        z = np.zeros(5)
        comm.recv(z, 0, tag=4)
        return z.tolist() == [0, 1, 2, 3, 4]

    assert run_threads(2, rank, config=WORLD, timeout=60) == [True] * 2


def test_nobody_sends(host_kernels):
    """A receiver gives up on the host, and the communicator stays usable."""

    def rank(comm):
        make = connected(comm)
        y = make(np.zeros(4))
        with pytest.raises(CollTimeout):
            comm.recv(y, 1 - comm.rank, timeout=0.05)
        work = comm.irecv(y, 1 - comm.rank)
        assert not work.done()
        with pytest.raises(CollTimeout):
            work.wait(0.05)
        comm.barrier()
        comm.send(make(np.full(4, comm.rank)), 1 - comm.rank)
        with pytest.raises(MismatchError):  # integers came
            work.wait()
        return comm.all_reduce(make(np.ones(2))).get().tolist()

    assert run_threads(2, rank, config=WORLD, timeout=60) == [[2.0, 2.0]] * 2


def test_nobody_receives(host_kernels):
    """The sender's stream gives up, names the receiver, and the communicator is over."""

    def rank(comm):
        make = connected(comm)
        if comm.rank == 0:
            comm.send(make(np.ones(20_000), symmetric=True), 1, timeout=0.1)
            with pytest.raises(CollTimeout, match=r"for a message to be received by rank 1"):
                comm.send(make(np.ones(4)), 1)
        return True

    assert run_threads(2, rank, config=WORLD, timeout=60) == [True] * 2


def test_what_is_refused(host_kernels, monkeypatch):
    def rank(comm):
        x = DeviceArray(np.ones(4))
        with pytest.raises(ArgumentError, match="not connected yet; call a collective"):
            comm.send(x, 0)
        make = connected(comm)
        for call, text in (
            (lambda: comm.send(x, 2), "dst=2; accepted: 0 to 1"),
            (lambda: comm.isend(x, 1, -1), "tag=-1; accepted"),
            (lambda: comm.recv(x[::2], 0), "contiguous"),
            (lambda: comm.send(np.ones(4), 1, stream=3), "stream= is for arrays on a CUDA device"),
            (lambda: comm.send(x, 1, timeout=0), "seconds above 0"),
            (lambda: comm.sendrecv(x, 1, np.ones(4), 1), "host memory"),
        ):
            with pytest.raises(ArgumentError, match=text):
                call()
        comm.barrier()
        if comm.rank == 0:
            stream = Stream()
            stream.begin_capture()
            try:
                with pytest.raises(ArgumentError, match="cannot be captured"):
                    comm.send(make(np.ones(4)), 1)
            finally:
                stream.end_capture()
        comm.barrier()

    run_threads(2, rank, config=WORLD, timeout=60)

    def over_nccl(comm):
        with pytest.raises(ArgumentError, match="need device_transport='cuda'"):
            comm.send(DeviceArray(np.ones(4)), 0)

    monkeypatch.setattr(nccl, "find_binding", lambda: Binding)
    run_threads(2, over_nccl, config=MESSAGES)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_virtual_ranks(host_kernels, n):
    xs = [np.arange(3.0 * (r + 1)).reshape(-1, 3) + 100 * r for r in range(n)]
    dsts = [(r + 1) % n for r in range(n)]
    with virtual_ranks(n) as ranks:
        got = ranks.sendrecv([DeviceArray(x.copy()) for x in xs], dsts)
        assert all(np.array_equal(got[(r + 1) % n].get(), xs[r]) for r in range(n))
        if n == 1:
            return
        dsts = [1, *[None] * (n - 1)]
        out = [None, DeviceArray(np.zeros((1, 3))), *[None] * (n - 2)]
        got = ranks.sendrecv([DeviceArray(x.copy()) for x in xs], dsts, out=out)
        assert got[1] is out[1]
        assert np.array_equal(got[1].get(), xs[0])
        assert got[0] is None
        assert got[2:] == [None] * (n - 2)
        for bad in ([0] * n, [n] * n, [0]):
            with pytest.raises(ArgumentError, match=r"accepted: each of the ranks|a list of"):
                ranks.sendrecv([DeviceArray(x) for x in xs], bad)
