"""Heaps that peers map: by descriptors, by fabric handles, or by CUDA IPC for everybody."""

import ctypes
import os
from ctypes import byref

import numpy as np
import pytest

from cuda.host_cupy import DeviceArray
from pycoll.config import Config
from pycoll.cuda.device.library import FABRIC, VMM
from pycoll.errors import ArgumentError
from pycoll.testing import run_processes, run_threads

SETTINGS = {"timeout_s": 15, "heap_bytes": 1 << 28, "device_heap_bytes": 1 << 20}
COUNT = 100_001  # too many for the low-latency protocol, which reaches no array of others


def run(n, rank, **settings):
    return run_processes(n, rank, config=Config(**SETTINGS, **settings), timeout=40)


def symmetric(comm, values):
    x = comm.empty(COUNT, "f4", device="cuda")
    x._values[:] = values
    return x


def summed(comm):
    """All-reduce an array of the heap in place; return the result and whether it was direct."""
    x = symmetric(comm, comm.rank + 1)
    comm.all_reduce(x, out=x)
    return x.get(), is_direct(comm)


def is_direct(comm):
    """Whether the newest call has worked on arrays where they are."""
    return next(reversed(comm._session.device.transport._calls._calls)).direct


def heap_of(comm):
    return comm._session.device.transport.memory


def check(results, n):
    for total, direct in results:
        assert (total == n * (n + 1) / 2).all()
        assert direct


@pytest.mark.parametrize("memory", ["auto", "ipc"])
@pytest.mark.parametrize("n", [2, 3])
def test_processes_reach_each_others_heaps(host_kernels, n, memory):
    """The kernels of every process read and write what the others have mapped."""

    def rank(comm):
        total, direct = summed(comm)
        assert heap_of(comm).virtual == (memory == "auto")
        private = comm.all_gather(DeviceArray(np.full(5, comm.rank)))  # through the cells
        assert private.get().tolist() == np.repeat(np.arange(n), 5).tolist()
        return total, direct

    check(run(n, rank, device_memory=memory), n)


def test_by_fabric_handles_where_descriptors_are_refused(host_kernels):
    host_kernels.vmm(VMM | FABRIC, descriptors=False)

    def rank(comm):
        result = summed(comm)
        assert heap_of(comm).virtual
        return result

    check(run(2, rank), 2)


@pytest.mark.parametrize("what", ["device", "import", "meeting", "export"])
def test_what_one_rank_lacks_turns_all_to_ipc(host_kernels, monkeypatch, what):
    """Arrays of before go on working, through cells; those made later are reached as they are."""

    def rank(comm):
        if comm.rank == 1 and what == "device":
            host_kernels.vmm(0)
        if comm.rank == 1 and what == "import":
            host_kernels.vmm(VMM, descriptors=False)
        if comm.rank == 1 and what == "meeting":
            monkeypatch.setattr("socket.send_fds", refuse)
        if comm.rank == 1 and what == "export":
            call = host_kernels.call
            host_kernels.call = lambda name, *rest: (
                refuse() if name == "vmm_export" else call(name, *rest)
            )
        before = symmetric(comm, comm.rank + 1)
        comm.all_reduce(before, out=before)
        assert not heap_of(comm).virtual
        assert heap_of(comm).mapping is None
        direct = is_direct(comm)
        again = before.get()
        comm.all_reduce(before, out=before)
        assert (before.get() == 3 * again).all()
        files = len(os.listdir("/proc/self/fd"))
        after = summed(comm)
        assert len(os.listdir("/proc/self/fd")) - files == 3  # the new heaps, nothing left over
        return again, direct, after

    results = run(3, rank)
    for first, direct, (total, new) in results:
        assert (first == 6).all()
        assert (total == 6).all()
        assert not direct
        assert new


def refuse(*_):
    raise OSError("refused")


def test_heaps_that_are_made_one_after_the_other(host_kernels):
    """Until all ranks have one, arrays go through cells."""

    def rank(comm):
        found = []
        for late in range(comm.world_size):
            x = symmetric(comm, 1) if comm.rank <= late else DeviceArray(np.ones(COUNT, "f4"))
            assert (comm.all_reduce(x).get() == comm.world_size).all()
            maps = comm._session.device.transport._maps._heaps
            found.append(sorted(maps))
        check([summed(comm)], comm.world_size)
        return found

    found = run(3, rank)
    assert found[0] == [[], [1], [1, 2]]
    assert found[2] == [[0], [0, 1], [0, 1]]


def test_memory_outlives_its_owner(host_kernels):
    """Virtual memory that a peer has mapped is there until the peer has closed it too."""

    def rank(comm):
        x = symmetric(comm, 7)
        comm.all_reduce(x)
        transport = comm._session.device.transport
        if comm.rank == 0:
            mapping = heap_of(comm).mapping
            host_kernels.call("vmm_close", byref(mapping))
        comm.barrier()
        seen = None
        if comm.rank == 1:
            (mapped,) = transport._maps._heaps.values()
            seen = ctypes.cast(mapped.pointer, ctypes.POINTER(ctypes.c_float))[0]
        comm.barrier()
        if comm.rank == 0:
            os._exit(0)
        return seen

    assert run_processes(2, rank, config=Config(**SETTINGS), may_die=[0])[1] == 7


def test_threads_hand_descriptors_to_each_other(host_kernels):
    check(run_threads(4, summed, config=Config(**SETTINGS)), 4)


def test_the_setting():
    assert Config.from_env({"PYCOLL_DEVICE_MEMORY": "ipc"}).device_memory == "ipc"
    with pytest.raises(ArgumentError, match="device_memory is 'vmm'; accepted: auto, ipc"):
        Config(device_memory="vmm")
