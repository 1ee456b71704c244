"""Symmetric memory: arrays from the pool, under NumPy's allocation handler, and moved in place."""

import gc
import mmap
import os
import threading

import numpy as np
import pytest

import oracle
from pycoll.config import Config
from pycoll.errors import ArgumentError
from pycoll.runtime.calls.prepared import CallRequest
from pycoll.testing import run_processes, run_threads
from pycoll.types import Kind

MIB = 1 << 20
SMALL = Config(timeout_s=10, heap_bytes=16 * MIB)


def usage(comm):
    """Return bytes in use, and bytes kept for reuse."""
    gc.collect()
    return comm._session.memory.heap.usage(comm._session.memory.region)


def is_direct(comm, x, out):
    """Whether an all_reduce would work on these arrays in place."""
    request = CallRequest(Kind.ALL_REDUCE)
    return comm._session.prepare(request, x, out).binding.direct


def test_arrays_from_the_pool():
    def rank(comm):
        for _ in range(200):  # many times the size of the region
            x = comm.zeros(4 * MIB, np.uint8)
            assert x[::4096].max() == 0
            x[:] = 1
        view = comm.zeros((4, 5), np.int16)[1:, ::2]
        other = comm.empty(1000, np.uint8)
        other[:] = 7
        like = comm.empty_like(np.ones((3, 2), np.complex64)[::2])
        assert (like.shape, like.dtype, like.flags.c_contiguous) == ((2, 2), np.complex64, True)
        return int(view.sum())

    assert run_threads(2, rank, config=SMALL) == [0, 0]


def test_blocks_are_reused_and_never_overlap():
    def rank(comm):
        random, live = np.random.default_rng(comm.rank), {}
        for step in range(3000):
            if live and random.random() < 0.5:
                key = random.choice(list(live))
                assert (live.pop(key) == key % 251).all()
            else:
                nbytes = int(2 ** random.uniform(0, 17))
                x = comm.empty(nbytes, np.uint8)
                assert x.ctypes.data % 64 == 0
                x[:] = step % 251
                live[step] = x
        for key, x in live.items():
            assert (x == key % 251).all()
        del x
        live.clear()
        used, kept = usage(comm)
        return used == 0 and 0 < kept <= 16 * MIB

    assert run_threads(2, rank, config=SMALL) == [True, True]


def test_what_is_asked_for_again_and_again_is_kept():
    def rank(comm):
        heap, region = comm._session.memory.heap, comm._session.memory.region
        sizes = [k * MIB for k in (24, 30, 40, 100)]  # together more than is kept at first
        kept = []
        for _ in range(4):
            live = [comm.empty(size, np.uint8) for size in sizes]
            del live[:]
            kept.append(heap.usage(region)[1])
        again = [comm.empty(size, np.uint8) for size in sizes]  # nothing of them is fresh
        reused = heap.usage(region)[1]
        del again[:]
        once = comm.empty(300 * MIB, np.uint8)
        del once
        used, left = usage(comm)  # what was asked for once has gone back to the system
        assert (used, left < 300 * MIB) == (0, True)
        return kept[0] <= 64 * MIB, kept[-1] >= sum(sizes), reused < 10 * MIB

    def in_turn(comm):
        return [comm.empty(k * MIB, np.uint8).size for k in (40, 56) * 4], usage(comm)[1]

    config = Config(timeout_s=10, heap_bytes=1 << 30)
    assert run_threads(2, rank, config=config) == [(True, True, True)] * 2
    assert run_threads(2, in_turn, config=config) == [([40 * MIB, 56 * MIB] * 4, 96 * MIB)] * 2


def test_a_full_heap():
    def rank(comm):
        blocks = [comm.empty(MIB, np.uint8) for _ in range(10)]
        blocks.clear()  # they wait for reuse, and must make room for one of another size
        large = comm.empty(14 * MIB, np.uint8)
        with pytest.raises(MemoryError, match="make the heap larger"):
            comm.empty(4 * MIB, np.uint8)
        large[:] = 1
        return comm.all_reduce(large, out=large)[-1] == 2

    assert run_processes(2, rank, config=SMALL) == [True, True]


def test_numpy_allocates_in_the_heap():
    def rank(comm):
        with comm.symmetric():
            x = np.full((300, 100), comm.rank + 1.0)
            small = np.array([1, 2, 3])
            grown = np.fromiter((i for i in range(5000)), np.int64)  # grows by realloc
            joined = np.concatenate([small, grown])
            zeros = np.zeros(10_000)
        outside = np.ones((300, 100))
        held = [
            comm._session.memory.heap.contains(a.ctypes.data, a.nbytes)
            for a in (x, small, grown, joined, zeros, outside)
        ]
        assert held == [True] * 5 + [False]
        assert is_direct(comm, x, x)
        assert not is_direct(comm, x, outside)
        assert joined.tolist() == [1, 2, 3, *range(5000)]
        assert not zeros.any()
        comm.all_reduce(x, out=x)
        grown.resize(20_000, refcheck=False)
        assert grown[4999] == 4999
        assert not grown[5000:].any()
        total = float(x.sum())
        del x, small, grown, joined, zeros
        return total, usage(comm)[0]

    assert run_threads(2, rank) == [(90_000.0, 0)] * 2
    assert run_processes(2, rank) == [(90_000.0, 0)] * 2


def test_the_allocation_handler_is_of_one_thread():
    def rank(comm):
        found = []
        contains = comm._session.memory.heap.contains

        def other():
            found.append(contains(np.ones(1000).ctypes.data, 8000))

        with comm.symmetric():
            with comm.symmetric():
                pass
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            inside = contains(np.ones(1000).ctypes.data, 8000)
            with pytest.raises(MemoryError):
                np.ones(40 * MIB, np.uint8)
        with pytest.raises(KeyError), comm.symmetric():
            raise KeyError
        return found, inside, contains(np.ones(1000).ctypes.data, 8000)

    assert run_processes(1, rank, config=SMALL) == [([False], True, False)]


def test_a_forked_child_gets_ordinary_memory():
    def rank(comm):
        with comm.symmetric():
            x = np.ones(1000)
            child = os.fork()
            if child == 0:
                y = np.zeros(1000) + 2
                del x
                z = np.ones(1000)
                os._exit(int(y[-1] + z[-1]))
            status = os.waitpid(child, 0)[1]
            again = np.full(1000, 5.0)
        return os.waitstatus_to_exitcode(status), float(x.sum()), float(again.sum())

    assert run_processes(1, rank) == [(3, 1000.0, 5000.0)]


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("shift", [0, 3])
def test_collectives_on_registered_arrays(run, collective, shift):
    n, count = 3, 3 * 7001

    def rank(comm):
        private = np.empty(n * count + shift, np.int32)[shift:]
        out_count = {"all_gather": n * count, "reduce_scatter": count // n}.get(collective, count)
        target = np.empty(out_count + shift, np.int32)[shift:]
        comm.register(private)
        comm.register(target)
        x, everybody = private[:count], [np.arange(count) * (r + 2) for r in range(n)]
        want = oracle.expected(collective, everybody)[comm.rank]
        for call in range(3):
            x[:] = everybody[comm.rank]
            target[:] = -1
            work = getattr(comm, collective)(x, out=target, async_op=call == 1)
            if call == 1:
                work.wait()
            assert (target == want).all()
            assert (x == everybody[comm.rank]).all()
        comm.unregister(private)
        assert (x == everybody[comm.rank]).all()
        assert (getattr(comm, collective)(x) == want).all()
        return True

    assert run(n, rank) == [True] * n


def test_what_registering_does():
    def rank(comm):
        x = np.arange(100_000, dtype=np.float64) + comm.rank
        part = x[1000:-999]
        assert not is_direct(comm, x, x)
        comm.register(x)
        assert (x == np.arange(100_000) + comm.rank).all()
        assert is_direct(comm, x, x)
        assert is_direct(comm, part, part)
        comm.all_reduce(x, out=x)
        assert (x == 2 * np.arange(100_000) + 1).all()
        part[:] = comm.rank
        with comm.dup() as twin:
            twin.all_reduce(part, out=part)
        assert (part == 1).all()
        assert x[999] == 1999
        with pytest.raises(ValueError, match="resize"):
            x.resize(200_000)
        heap = comm._session.memory.heap
        del part, x
        gc.collect()
        y = comm.zeros(MIB, np.uint8)  # the pages that came back
        assert not y.any()
        return heap.is_aliased(0, 2**63)

    assert run_processes(2, rank) == [False, False]


def test_two_parts_of_an_array_end_with_it():
    def rank(comm):
        x = np.full(200_000, comm.rank + 1.0)
        parts = x[:100_000], x[100_000:]
        for part in parts:
            comm.register(part)
            assert is_direct(comm, part, part)
        comm.unregister(parts[0])
        with pytest.raises(ValueError, match="resize"):
            x.resize(100)
        comm.register(parts[0])
        comm.all_reduce(x, out=x)
        assert (x == 3).all()
        for part in parts:
            comm.unregister(part)
        del part, parts
        assert x.base is None
        x.resize(300_000, refcheck=False)  # as before it was registered
        comm.register(x)
        assert x.base is not None
        with pytest.raises(ArgumentError, match="registered already"):
            comm.register(x[1000:])
        x.fill(comm.rank)
        comm.all_reduce(x, out=x)
        assert (x == 1).all()
        heap = comm._session.memory.heap
        del x
        return heap.is_aliased(0, 2**63)

    assert run_processes(2, rank) == [False, False]


def test_registered_memory_is_freed():
    def rank(comm):
        for _ in range(30):  # more than the region holds
            x = np.ones(300_000)
            comm.register(x)
            x += 1
        y = np.ones(300_000)
        comm.register(y)
        base = y
        view = base[5:].reshape(5, -1)
        del y, base
        view += comm.rank
        comm.all_reduce(view, out=view)
        return float(view.max()), float(x[-1])

    assert run_processes(2, rank, config=SMALL) == [(3.0, 2.0)] * 2


def test_refused_registrations(tmp_path):
    def rank(comm):
        file = tmp_path / f"{comm.rank}"
        file.write_bytes(bytes(MIB))
        x = np.ones(10_000)
        comm.register(x)
        frozen = np.ones(10_000)
        frozen.flags.writeable = False
        refused = {
            "no whole page": np.ones(10),
            "registered already": x[:9000],
            "read-only": frozen,
            "symmetric memory already": comm.empty(10_000),
            "belongs to a file": np.memmap(file, mode="r+"),
            "shared already": np.frombuffer(mmap.mmap(-1, MIB), np.uint8),
            "C-contiguous": np.ones((200, 200))[:, :100],
        }
        for text, array in refused.items():
            with pytest.raises(ArgumentError, match=text):
                comm.register(array)
        with pytest.raises(ArgumentError, match="not registered"):
            comm.unregister(frozen)
        with pytest.raises(MemoryError):
            comm.register(np.ones(20 * MIB, np.uint8))
        comm.unregister(x)
        comm.register(x)
        return float(comm.all_reduce(x).sum())

    assert run_processes(2, rank, config=SMALL) == [20_000.0] * 2


def test_a_tensor_is_registered():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def rank(comm):  # in threads: what PyTorch's own threads do after a fork is another matter
        x = torch.arange(50_000, dtype=torch.float32)
        comm.register(x)
        x += comm.rank
        comm.all_reduce(x, out=x)
        comm.unregister(x)
        return bool((x == 2 * torch.arange(50_000) + 1).all())

    assert run_threads(2, rank) == [True, True]
