"""Symmetric memory of which little is left: what still fits is given."""

import itertools

import numpy as np
import pytest

from pycoll.config import Config
from pycoll.testing import run_threads

MIB = 1 << 20
SMALL = Config(timeout_s=10, heap_bytes=15 * MIB)


def test_what_waits_for_reuse_makes_room_for_a_registered_array():
    def rank(comm):
        freed = [comm.empty(9 * MIB, np.uint8), comm.empty(3 * MIB, np.uint8)]
        freed.clear()
        x = np.full(10 * MIB, comm.rank + 1, np.uint8)
        comm.register(x)
        comm.all_reduce(x, out=x)
        comm.unregister(x)
        return int(x[0]), int(x[-1])

    assert run_threads(2, rank, config=SMALL) == [(3, 3), (3, 3)]


@pytest.mark.parametrize("nbytes", [12 * MIB + 1, 14 * MIB + 1, 15 * MIB])
def test_an_array_has_what_it_asks_for_where_it_fits(nbytes):
    def rank(comm):
        for _ in range(3):
            x = comm.zeros(nbytes, np.uint8)
            assert not x.any()
            x[:] = comm.rank + 1
            comm.all_reduce(x, out=x)
            assert (x == 3).all()
            del x
        with comm.symmetric():
            x = np.empty(nbytes, np.uint8)
        return comm._session.memory.heap.contains(x.ctypes.data, nbytes)

    assert run_threads(2, rank, config=SMALL) == [True, True]


def test_the_last_page():
    def rank(comm):
        sizes = [14 * MIB + 1, MIB // 2, MIB // 2 - 8192, 100, 3000]
        blocks = [comm.empty(size, np.uint8) for size in sizes]
        spans = sorted((b.ctypes.data, b.ctypes.data + b.nbytes) for b in blocks)
        with pytest.raises(MemoryError, match="drop some"):
            comm.empty(1000, np.uint8)
        return all(end <= first for (_, end), (first, _) in itertools.pairwise(spans))

    assert run_threads(2, rank, config=SMALL) == [True, True]


@pytest.mark.parametrize("nbytes", [15 * MIB + 1, 1 << 40, 2**63 - 1])
def test_what_does_not_fit(nbytes):
    def rank(comm):
        with pytest.raises(MemoryError, match="a rank has 15728640; make the heap larger"):
            comm.empty(nbytes, np.uint8)
        return float(comm.all_reduce(comm.zeros(4000) + 1)[-1])

    assert run_threads(2, rank, config=SMALL) == [2.0, 2.0]


def test_freed_ranges_join_in_any_order():
    """Arrays never overlap, and what all of them leave is one range again."""
    heap_bytes = 32 << 20

    def rank(comm):
        draw = np.random.default_rng(comm.rank)
        kept = {}
        for number in range(600):
            if kept and draw.random() < 0.5:
                key = draw.choice(list(kept))
                assert (kept.pop(key) == key).all()
            else:
                try:
                    kept[number] = comm.empty(int(draw.integers(1 << 12, 3 << 20)), np.int16)
                except MemoryError:
                    continue
                kept[number][:] = number
        kept.clear()
        return comm.empty(heap_bytes, np.uint8).nbytes

    assert run_threads(2, rank, config=Config(heap_bytes=heap_bytes)) == [heap_bytes] * 2
