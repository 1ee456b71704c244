"""Activations and optimizer states on the host, with copies as late as they may be."""

import ctypes
import weakref
from typing import ClassVar

import numpy as np
import pytest

from cuda import host_cupy
from parallel.gpt_training import train
from pycoll.config import Config
from pycoll.errors import ArgumentError
from pycoll.parallel import DataParallel, Mesh, Sequential
from pycoll.parallel.channels import Ledger
from pycoll.parallel.engine.offload import Offloaded
from pycoll.parallel.nn import CrossEntropy, Linear
from pycoll.parallel.random import Key
from pycoll.parallel.state.host_memory import HostMemory
from pycoll.testing import run_threads

WORLD = Config(timeout_s=20, heap_bytes=1 << 28, device_heap_bytes=1 << 20)


class LateStream(host_cupy.Stream):
    """A stream that does nothing before somebody waits for it: the latest that CUDA allows."""

    streams: ClassVar = weakref.WeakValueDictionary()
    copied = 0  # by all of them

    def __init__(self, non_blocking):
        super().__init__(ptr=7000 + len(self.streams))
        self.streams[self.ptr] = self
        self.queue, self.done = [], 0

    def record(self):
        return LateEvent(self, self.done + len(self.queue))

    def run_until(self, count):
        while self.done < count:
            self.queue.pop(0)()
            self.done += 1
            LateStream.copied += 1

    def synchronize(self):
        self.run_until(self.done + len(self.queue))


class LateEvent:
    """An event of such a stream."""

    def __init__(self, stream, count):
        self.stream, self.count = stream, count

    def synchronize(self):
        self.stream.run_until(self.count)


class Layers(host_cupy.Stream):
    """The stream of the layers, on which everything happens at once."""

    def wait_event(self, event):
        event.synchronize()


@pytest.fixture
def late(monkeypatch, host_kernels):
    import cupy

    def copy(to, source, nbytes, kind, stream):
        if stream not in LateStream.streams:
            return ctypes.memmove(to, source, nbytes)
        LateStream.streams[stream].queue.append(lambda: ctypes.memmove(to, source, nbytes))

    layers = Layers()
    monkeypatch.setattr(cupy.cuda, "Stream", LateStream)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: layers)
    monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", copy)
    return cupy


def kept_layers(cupy, count=5):
    rng = np.random.default_rng(0)
    return [
        {"x": host_cupy.DeviceArray(rng.standard_normal((64, 33), np.float32)), "few": [i, None]}
        for i in range(count)
    ]


def test_arrays_come_back_when_copies_are_late(late):
    """Memory of an array is used again by what comes next, as that of a device is."""
    memory, ledger = HostMemory(), Ledger()
    offload, stored, want = Offloaded(memory, ledger), [], []
    for layer in kept_layers(late):
        want.append(layer["x"].get())
        turned = layer["x"].T
        stored.append(offload.put((layer, turned)))
        gone = layer.pop("x")
        if len(stored) > 2:  # by then nobody but the copy may need what was kept before
            old = [block() for block in offload._writing[0]]
            assert len(offload._writing) == 2
            assert all(block.written._event is not None for block in old)
            del old
        del gone, turned
    assert ledger.stored["activation"] == sum(x.nbytes for x in want)  # both share one block
    for packed, value in zip(stored[::-1], want[::-1], strict=True):
        offload.fetch(packed)
        offload.fetch(packed)
        layer, turned = offload.take(packed)
        np.testing.assert_array_equal(layer["x"].get(), value)
        np.testing.assert_array_equal(turned.get(), value.T)
        assert turned.strides == value.T.strides
        assert layer["few"][1] is None
    stored.clear()
    del packed
    assert ledger.stored["activation"] == 0
    assert sum(map(len, memory._free.values())) == len(want)  # pinned memory is used again
    assert not offload.problems()
    memory.close()


def test_what_an_error_leaves_is_waited_for(late):
    memory = HostMemory()
    offload = Offloaded(memory, Ledger())
    packed, *_ = [offload.put(layer) for layer in kept_layers(late)]
    copies = memory._copies
    before = len(copies.queue)
    offload.fetch(packed)
    assert len(copies.queue) == before + 1
    packed.held.clear()  # the array is gone before its copy came
    assert not copies.queue


def test_no_pinned_memory_is_a_problem(late, monkeypatch):
    def none(nbytes):
        raise late.cuda.runtime.CUDARuntimeError("out of memory")

    monkeypatch.setattr(late.cuda, "alloc_pinned_memory", none)
    offload = Offloaded(HostMemory(), Ledger())
    saved = kept_layers(late)[0]
    assert offload.take(offload.put(saved))["x"] is saved["x"]
    (problem,) = offload.problems()
    assert "no room for 8448 bytes" in problem
    assert "out of memory" in problem


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("offload", ["activations", "optimizer", "all"])
def test_training_has_the_same_bits(host_kernels, late, offload, zero):
    """With every copy as late as it may be."""

    def rank(comm, **options):
        return train(comm, {"dp": 2}, steps=3, device="cuda", zero=zero, **options)

    def run(**options):
        return run_threads(2, lambda comm: rank(comm, **options), config=WORLD, timeout=120)

    LateStream.copied = 0
    found = run(offload=offload)
    assert (LateStream.copied > 0) == (offload != "optimizer")  # kernels reach the states
    for mine, other in zip(found, run(), strict=True):
        assert mine[:2] == other[:2]
        for name, value in other[2].items():
            np.testing.assert_array_equal(mine[2][name], value)


def test_a_full_host_is_an_error_on_every_rank(host_kernels, late, monkeypatch):
    def none(nbytes):
        raise MemoryError(f"{nbytes} bytes")

    monkeypatch.setattr(late.cuda, "alloc_pinned_memory", none)

    def rank(comm):
        model = Sequential([("linear", Linear(5, 3, Key(4)))])
        with Mesh(comm, dp=-1) as mesh, pytest.raises(ArgumentError, match="no pinned memory"):
            DataParallel(model, CrossEntropy(), mesh, device="cuda", offload="optimizer")

    run_threads(2, rank, config=WORLD)
