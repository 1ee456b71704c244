"""all_gather and broadcast by copies on the stream, between two gates."""

from ctypes import c_uint64, c_void_p

import numpy as np
import pytest

from cuda.host_cupy import DeviceArray
from device_library import (
    FOLLOWED,
    INTERPRET,
    MISMATCH,
    SCHEDULE,
    TIMEOUT,
    DeviceError,
    Library,
    World,
    host_library,
    plans_of,
    pointers,
    spec_of,
)
from pycoll import virtual_ranks
from pycoll.algorithms import find
from pycoll.config import Config
from pycoll.cuda.device.library import BEST, COPIES, MULTICAST_SUM
from pycoll.errors import MismatchError, ScheduleError
from pycoll.testing import run_processes, run_threads

GATHER, BROADCAST = find("all_gather", "direct_pull"), find("broadcast", "direct")
BLOCK = 37


@pytest.fixture
def library():
    loaded = Library(host_library())
    yield loaded
    loaded.schedule(-1)


def queue(world, rank, handle, ins, outs, timeout_ms=1000):
    """Put a call on a rank's stream; it is told where all arrays are."""
    ends = pointers(ins), pointers(outs)
    limit = c_uint64(timeout_ms * 1_000_000)
    form = 0, 0, COPIES, limit, c_uint64(0), c_void_p(rank + 1)
    world.library.launch(handle, *ends, *form)


def gathering(world, entry=GATHER, **params):
    """Return calls of all ranks, inputs, outputs, and what must come out."""
    n = world.n
    whole = entry.collective == "all_gather"
    count = BLOCK * n if whole else BLOCK
    specs = [spec_of(p, "int32", count=count) for p in plans_of(entry, n, **params)]
    ins = [np.arange(BLOCK, dtype=np.int32) + 100 * rank for rank in range(n)]
    outs = [np.zeros(count, np.int32) for _ in ins]
    return world.call(specs), ins, outs, np.concatenate(ins) if whole else ins[params["root"]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [2, 3, 5])
def test_peers(library, n, seed):
    """Several calls in a row, and kernels between them, under schedules of all lanes."""
    library.schedule(seed)
    with World(library, n, peers=True) as world:
        calls = [gathering(world), gathering(world, BROADCAST, root=n - 1), gathering(world)]
        for handles, ins, outs, _ in calls:
            for rank, handle in enumerate(handles):
                queue(world, rank, handle, ins, outs)
            world.launch(handles, ins, outs)  # the same by kernels
        world.synchronize()
        assert world.failed() == []
        for _, _, outs, want in calls:
            assert all((out == want).all() for out in outs)


def test_a_rank_that_does_not_come(library):
    """The others give up, and only what is theirs has been written; then they go on."""
    library.schedule(1)
    with World(library, 3, peers=True) as world:
        handles, ins, outs, want = gathering(world)
        for rank in (0, 2):
            queue(world, rank, handles[rank], ins, outs)
        world.synchronize()
        assert sorted(world.error(r).kind for r in (0, 2)) == [TIMEOUT, FOLLOWED] or [
            world.error(r).kind for r in (0, 2)
        ] == [TIMEOUT, TIMEOUT]
        assert world.error(1).kind == 0
        assert (outs[1] == 0).all()
        world.each("group_reset")
        for rank, handle in enumerate(handles):
            queue(world, rank, handle, ins, outs)
        world.synchronize()
        assert world.failed() == []
        assert all((out == want).all() for out in outs)


def test_a_rank_with_kernels_does_not_match(library):
    library.schedule(2)
    with World(library, 2, peers=True) as world:
        handles, ins, outs, _ = gathering(world)
        queue(world, 0, handles[0], ins, outs)
        one = pointers(ins[1:]), pointers(outs[1:])
        limit = c_uint64(1_000_000_000)
        library.launch(handles[1], *one, 1, 64, INTERPRET, limit, c_uint64(0), c_void_p(2))
        world.synchronize()
        assert MISMATCH in {world.error(rank).kind for rank in (0, 1)}


@pytest.mark.parametrize("name", ["all_gather/direct_push", "all_gather/ring", "all_reduce/ring"])
def test_plans_that_do_more_are_refused(library, name):
    entry = find(*name.split("/"))
    with World(library, 3) as world:
        specs = [spec_of(p, "int32", count=30) for p in plans_of(entry, 3)]
        (handle,) = world.call(specs)
        x = [np.zeros(30, np.int32) for _ in range(3)]
        with pytest.raises(DeviceError, match="more than copy inputs") as caught:
            queue(world, 0, handle, x, x)
        assert caught.value.status == SCHEDULE


@pytest.mark.parametrize("n", [1, 2, 4])
def test_virtual_ranks(host_kernels, n):
    x = DeviceArray(np.arange(n * 6.0, dtype="f4").reshape(n, 6))
    with virtual_ranks(n) as ranks:
        launch = ranks.bind("all_gather", x, algorithm="direct_pull")
        assert (launch(method=COPIES).get() == x.get().ravel()).all()
        assert ranks.info(launch, COPIES).kernel.decode().startswith("copies")
        y = DeviceArray(x.get())
        ranks.bind("broadcast", y, out=y, root=n - 1)(method=COPIES)
        assert (y.get() == x.get()[n - 1]).all()
        if n > 1:
            with pytest.raises(ScheduleError, match="more than copy"):
                ranks.bind("all_gather", x)(method=COPIES)
    assert len(host_kernels.launches) == 2


def heap_array(comm, values):
    x = comm.empty(values.shape, values.dtype, device="cuda")
    x._values[:] = values
    return x


def settings(**more):
    return Config(timeout_s=10, heap_bytes=1 << 28, device_heap_bytes=1 << 20, **more)


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_a_communicator_copies_what_is_large(host_kernels, run):
    """In place and not; small calls, and arrays outside of the heap, go by kernels."""

    def rank(comm):
        methods, call, n = [], host_kernels.call, comm.world_size

        def note(name, *rest):
            methods.extend([rest[5]] if name == "launch" else [])
            return call(name, *rest)

        if run is run_processes:
            host_kernels.call = note
        heap_array(comm, np.zeros(64 * comm.rank + 1))  # arrays lie at different places
        x = heap_array(comm, np.full(1000, comm.rank, "i4"))
        out = heap_array(comm, np.zeros(1000 * n, "i4"))
        want = np.repeat(np.arange(n), 1000)
        assert (comm.all_gather(x, out=out).get() == want).all()
        out._values[:] = -1
        out._values[1000 * comm.rank : 1000 * (comm.rank + 1)] = comm.rank
        comm.all_gather(out[1000 * comm.rank : 1000 * (comm.rank + 1)], out=out)
        assert (out.get() == want).all()
        y = heap_array(comm, np.full(3000, comm.rank, "i4"))
        comm.broadcast(y, 1)
        assert (y.get() == 1).all()
        few = heap_array(comm, np.full(10, comm.rank, "i4"))
        assert (comm.all_gather(few).get() == np.repeat(np.arange(n), 10)).all()
        assert (comm.all_gather(DeviceArray(x.get())).get() == want).all()
        assert comm.all_reduce(few).get()[0] == n * (n - 1) / 2
        return methods

    for methods in run(3, rank, config=settings(device_copy_bytes=8000)):
        # Small calls go in packets, where no order is asked for: that may be by multicast, too.
        assert methods in ([], [COPIES] * 3 + [MULTICAST_SUM, BEST, BEST])


def test_ranks_that_differ_launch_nothing(host_kernels):
    def rank(comm):
        x = heap_array(comm, np.ones(3000, "i4"))
        comm.broadcast(x)
        transport = comm._session.device.transport
        transport._copy_bytes = 8000 * comm.rank
        comm.barrier()
        launched = len(host_kernels.launches)
        with pytest.raises(MismatchError, match="nothing was launched"):
            comm.broadcast(x)
        comm.barrier()
        return len(host_kernels.launches) - launched

    assert run_threads(2, rank, config=settings()) == [0, 0]
