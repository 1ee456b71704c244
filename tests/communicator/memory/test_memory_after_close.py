"""Registered arrays whose process forks, or whose communicator ends: whose pages they are then."""

import contextlib
import gc
import os

import numpy as np
import pytest

import pycoll
from faults import InterruptAt, in_child, mode_at
from pycoll.config import Config
from pycoll.errors import ArgumentError
from pycoll.testing import run_processes

SMALL = Config(timeout_s=10, heap_bytes=16 << 20)
NBYTES = 60_000  # so few that the pages go back to malloc, not to the system


@pytest.mark.parametrize("how", ["collected", "unregistered"])
def test_what_a_forked_child_frees_is_its_own(how):
    def rank(comm):
        arrays = [np.full(NBYTES, 7, np.uint8) for _ in range(3)]
        any(map(comm.register, arrays))

        def child():
            if how == "unregistered":
                any(map(comm.unregister, arrays))
                assert all((x == 7).all() for x in arrays)
            arrays.clear()
            later = [np.full(NBYTES, 99, np.uint8) for _ in range(40)]
            return int(later[0][0])

        return in_child(child), all((x == 7).all() for x in arrays)

    assert run_processes(1, rank, config=SMALL) == [(99, True)]


def test_pages_of_a_communicator_that_is_gone_are_private():
    comm, x = pycoll.init(heap_bytes=16 << 20), bytearray(b"\7" * NBYTES)
    twin = comm.dup()
    comm.register(x)
    page = (np.frombuffer(x, np.uint8).ctypes.data // 4096 + 1) * 4096
    comm.close()
    del comm
    gc.collect()
    assert mode_at(page) == "rw-s"
    assert bytes(twin.all_reduce(np.frombuffer(x, np.uint8))) == b"\7" * NBYTES
    twin.close()
    del twin
    gc.collect()
    assert mode_at(page) == "rw-p"
    x += b"\7"  # nothing keeps it where it is any more
    assert x == b"\7" * (NBYTES + 1)


@pytest.mark.parametrize("part", [slice(10), slice(10, None), slice(None, None, 2)])
def test_a_part_of_a_registered_array_cannot_be_unregistered(part):
    x = np.full(NBYTES, 7, np.uint8)
    with pycoll.init(heap_bytes=16 << 20) as comm:
        comm.register(x)
        with pytest.raises(ArgumentError, match="part of what is"):
            comm.unregister(x[part])
        assert mode_at(x.ctypes.data + 4096) == "rw-s"
        comm.unregister(x.reshape(2, -1))
        assert mode_at(x.ctypes.data + 4096) == "rw-p"


def test_many_registrations_do_not_read_all_mappings():
    def has_read():
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])

    many, few = [np.full(NBYTES, i % 251, np.uint8) for i in range(600)], 100
    with pycoll.init(heap_bytes=64 << 20) as comm:
        for x in many[few:]:
            comm.register(x)
        with open("/proc/self/maps") as file:
            mappings = len(file.read())
        before = has_read()
        for x in many[:few]:
            comm.register(x)
        if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 11):
            assert has_read() - before < few * mappings / 10
        memory = comm._session.memory
        assert memory.locate(many[0].ctypes.data - 1, 2) is None
        for i, x in enumerate(many):
            start = x.ctypes.data
            assert memory.locate(start + NBYTES, 1) is None
            assert memory.locate(start, NBYTES + 1) is None
            assert memory.locate(start + 9, NBYTES - 9).pointer == start + 9
            assert (comm.all_reduce(x, out=x) == i % 251).all()
            comm.unregister(x)
            assert memory.locate(start, NBYTES) is None


def test_views_of_a_registered_array_in_any_direction():
    """They are symmetric memory, too; the first element of one may be its last in memory."""

    def rank(comm):
        x = np.arange(1 << 16, dtype=np.float64)
        comm.register(x)
        out = comm.empty(x.size, x.dtype)
        comm.all_reduce(x[::-1] if comm.rank else x, out=out)
        assert (out == x + x[::-1]).all()
        comm.all_reduce(x[::-1], out=out)
        return (out == 2 * x[::-1]).all()

    assert run_processes(2, rank) == [True] * 2


@pytest.mark.parametrize("way", ["register", "unregister", "dropped"])
def test_an_interrupt_at_any_point_of_moving_an_array(way):
    """It stays where it is or goes back, whole, and nothing else in the heap is touched."""

    def moved(comm, number):
        x = np.full(NBYTES, 7, np.uint8)
        page = x.ctypes.data + 4096
        interrupt = InterruptAt(number)
        if way == "register":
            interrupt.run(comm.register, x)
        else:
            comm.register(x)
            interrupt.run(comm.unregister, x)
        other = comm.empty(NBYTES, np.uint8)
        other[:] = 9
        if way == "dropped":
            del x
        else:
            assert (comm.all_reduce(x) == 7).all()
            with contextlib.suppress(ArgumentError):  # if it is not registered
                comm.unregister(x)
            assert mode_at(page) == "rw-p"
            comm.register(x)
            assert mode_at(page) == "rw-s"
            comm.unregister(x)
            assert mode_at(page) == "rw-p"
            assert (x == 7).all()
        assert (other == 9).all(), interrupt.where
        assert not comm._session.memory._registered, interrupt.where
        return interrupt.where

    def rank(comm):
        used = comm._session.memory.heap.usage(0)[0]
        number = 0
        while moved(comm, number):
            number += 1
        assert comm._session.memory.heap.usage(0)[0] == used
        return number > 20

    assert run_processes(1, rank, config=SMALL) == [True]
