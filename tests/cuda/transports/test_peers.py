"""Ranks and the devices they run on: who shares one, and how long they wait for each other."""

import math
import threading
from ctypes import byref

import numpy as np
import pytest

from cuda.host_cupy import DeviceArray
from pycoll.config import Config
from pycoll.cuda.device.library import DeviceInfo, Ipc
from pycoll.errors import ArgumentError, PeerRejected, TransportError
from pycoll.testing import run_threads

PEERS = Config(timeout_s=10, heap_bytes=1 << 28, device_heap_bytes=1 << 20)


@pytest.fixture
def asked(host_kernels, monkeypatch):
    """Return the functions of the device library that are called, with their arguments."""
    calls, call = [], host_kernels.call

    def note(name, *arguments):
        calls.append((name, *arguments))
        return call(name, *arguments)

    monkeypatch.setattr(host_kernels, "call", note)
    return calls


def most_blocks(comm):
    """Return how many blocks of a rank may run at once, of the call that was made."""
    calls = comm._session.device.transport._calls
    return calls.info(next(iter(calls._calls))).max_blocks


def test_threads_on_one_device_are_refused(host_kernels):
    """On every rank, before anything is launched; the communicator stays usable."""
    host_kernels.for_host = False

    def rank(comm):
        for _ in range(2):
            with pytest.raises(ArgumentError, match=r"ranks 0 and 1 .* pycoll\.virtual_ranks"):
                comm.all_reduce(DeviceArray(np.ones(4)))
        return comm.all_reduce(np.ones(2)).tolist()

    assert run_threads(3, rank, config=PEERS) == [[3.0, 3.0]] * 3
    assert host_kernels.launches == []


@pytest.mark.parametrize("refused", ["malloc", "group_peer"])
def test_a_device_without_memory_is_an_error_on_every_rank(host_kernels, monkeypatch, refused):
    """What has been taken is freed, and the next call tries again."""
    pointer, full = host_kernels.pointer, threading.local()

    def take(name, *arguments):
        if name == refused and getattr(full, "device", False):
            raise TransportError("the device has no memory left")
        return pointer(name, *arguments)

    monkeypatch.setattr(host_kernels, "pointer", take)

    def rank(comm):
        full.device = comm.rank == 1
        kind = TransportError if full.device else PeerRejected
        with pytest.raises(kind, match="the device has no memory left"):
            comm.all_reduce(DeviceArray(np.ones(4)))
        left = len(host_kernels.owned)
        full.device = False
        return left, comm.all_reduce(DeviceArray(np.ones(4))).get().tolist()

    found = run_threads(2, rank, config=PEERS)
    assert [total for _, total in found] == [[2.0] * 4] * 2
    assert found[1][0] <= 1, "rank 1 keeps nothing"


def test_threads_on_devices_of_their_own(host_kernels, asked, monkeypatch):
    def own_device(index):
        info = DeviceInfo()
        info.uuid[:8] = threading.get_ident().to_bytes(8, "little")
        return info

    host_kernels.for_host = False
    monkeypatch.setattr(host_kernels, "device", own_device)

    def rank(comm):
        total = comm.all_reduce(DeviceArray(np.ones(4))).get().tolist()
        return total, most_blocks(comm)

    assert run_threads(2, rank, config=PEERS) == [([2.0] * 4, 64)] * 2
    assert ("enable_peer_access", 0, 0) in asked


def test_ranks_that_share_a_device_leave_room_for_each_other(host_kernels):
    def rank(comm):
        comm.all_reduce(DeviceArray(np.ones(4)))
        return most_blocks(comm)

    assert run_threads(2, rank, config=PEERS) == [32, 32]
    assert run_threads(3, rank, config=PEERS) == [21] * 3


def test_limits_that_fit_no_word(host_kernels):
    """Infinity is as long as anybody can wait; what is no number is refused before it is sent."""

    def rank(comm):
        x = DeviceArray(np.ones(4))
        for limit in (math.inf, 1e300):
            assert comm.all_reduce(x, timeout=limit).get().tolist() == [2.0] * 4
        for limit in (math.nan, -math.inf, 10**400, "soon"):
            bad = pytest.raises(ArgumentError, match="a number of seconds above 0")
            with bad if comm.rank else pytest.raises(PeerRejected):
                comm.all_reduce(x, timeout=limit if comm.rank else None)

    run_threads(2, rank, config=PEERS)
    assert [limit for _, limit in host_kernels.launches] == [10**18] * 4
    host_kernels.launches.clear()
    endless = Config(timeout_s=1e300, heap_bytes=1 << 28)
    run_threads(2, lambda comm: comm.all_reduce(DeviceArray(np.ones(4))), config=endless)
    assert [limit for _, limit in host_kernels.launches] == [10**18] * 2


def test_memory_that_peers_map_lies_alone_in_its_blocks(host_kernels):
    """CUDA exports blocks of 2 MiB as a whole, with what else it has put there."""
    group = host_kernels.pointer("group_peer", 0, 0, 2, 4, 0)
    made = host_kernels.pointer("malloc", 0, 100)
    for pointer in host_kernels.pointer("group_control", group), made:
        ipc = Ipc()
        host_kernels.call("ipc_export", pointer, byref(ipc))
        assert ipc.nbytes >= 2 << 20
    host_kernels.call("group_destroy", group)
    host_kernels.call("free", made)
