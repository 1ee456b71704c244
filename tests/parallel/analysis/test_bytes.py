"""Bytes on the wire and in memory equal the formulas, counted where they happen."""

import gc
import os
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from parallel.models import CrossEntropy, batches, mlp
from pycoll.parallel import AdamW, DataParallel, Ledger, Mesh, Sequential, estimate
from pycoll.parallel.nn import Linear
from pycoll.parallel.random import Key
from pycoll.testing import run_processes, run_threads

SIZES = (7, 19, 11, 5)
ITEM = 4


def padded(engine):
    return sum(bucket.layout.padded for bucket in engine.buckets) * ITEM


def measure(comm, zero, k, axes, **options):
    engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, **axes), zero=zero, **options)
    calls = engine.ledger.calls.copy()
    report = engine.step(batches(k))
    return {
        "m": padded(engine),
        "report": report,
        "wire": dict(engine.ledger.wire),
        "calls": {key: n for key, n in (engine.ledger.calls - calls).items()},
        "live": {kind: n for kind, n in engine.ledger.live.items() if n},
        "count": sum(b.layout.count for b in engine.buckets),
        "buckets": len(engine.buckets),
        "peak": report.peak_bytes,
    }


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("n", "nbytes"), [(2, 300), (3, 25 << 20), (4, 700)])
@pytest.mark.parametrize("zero", range(4))
def test_wire_bytes_per_rank(zero, n, nbytes, k):
    rank = partial(measure, bucket_bytes=nbytes)
    for found in run_threads(n, rank, zero, k, {"dp": n}):
        block = found["m"] // n
        total = {0: 2, 1: 2, 2: k + 1, 3: 3 * k}[zero] * (n - 1) * block
        sent = found["report"].bytes
        assert sent["gradient"] + sent.get("parameter", 0) == total
        assert set(sent) <= {"gradient", "parameter", "norm", "count"}
        words = 70 + 6 + 3  # an exact sum, a vote, counts
        assert sent["norm"] == -(-2 * (n - 1) * words * 8 // n)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_talk_once_a_step(zero, k):
    shards, replicas = 2, 2
    for found in run_threads(4, measure, zero, k, {"replica": replicas, "dp": shards}):
        m, wire = found["m"], found["wire"]
        assert wire["replica gradient", "replica"] == 2 * (replicas - 1) * m // shards // replicas
        within = {2: k + 1, 3: 3 * k}[zero] * (shards - 1) * m // shards
        assert wire["gradient", "dp"] + wire["parameter", "dp"] == within
        across = [n for (p, _, _), n in found["calls"].items() if p == "replica gradient"]
        assert across == [found["buckets"]]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("zero", range(4))
def test_state_bytes_at_rest(zero, n):
    for found in run_threads(n, measure, zero, 2, {"dp": n}):
        full = found["m"]
        share = [full // (n if zero >= stage else 1) for stage in (3, 2, 1)]
        expected = dict(zip(("parameter", "gradient"), share, strict=False))
        assert found["live"] == {**expected, "optimizer": 2 * share[2]}
        assert 0 <= full - found["count"] * ITEM <= found["buckets"] * n * 64


def wide(sizes=(256,) * 9):
    return mlp(sizes)


def library():
    """Return the same of the library's layers, which write gradients where they are told."""
    return Sequential([(f"linear{i}", Linear(256, 256, Key(i).fold("x"))) for i in range(8)])


@pytest.mark.parametrize("model", [wide, library])
@pytest.mark.parametrize(("prefetch", "k"), [(0, 1), (1, 1), (1, 3), (2, 1)])
def test_peak_of_stage_3(prefetch, k, model):
    """Rest, and two layers of the largest kind; one more for each that is gathered ahead."""

    def rank(comm):
        options = {"zero": 3, "prefetch": prefetch, "order": "rank"}
        engine = DataParallel(model(), CrossEntropy(), Mesh(comm, dp=4), **options)
        rest = engine.ledger.total
        peaks = [engine.step(batches(k, sizes=(256, 256))).peak_bytes for _ in range(2)]
        assert engine.ledger.total == rest
        return rest, max(peaks), max(b.layout.padded for b in engine.buckets) * ITEM

    for rest, peak, layer in run_threads(4, rank):
        term = layer // 4 if k > 1 else 0  # a shard that has still to be added to the others
        assert rest + layer < peak <= rest + (2 + prefetch) * layer + term


def heap_bytes():
    """Return the bytes that the symmetric memory of all ranks really takes."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "memfd:pycoll" in (name := os.readlink(f"/proc/self/fd/{fd}")):
                if "heap" in name:
                    return os.fstat(int(fd)).st_blocks * 512
        except FileNotFoundError:
            continue
    raise AssertionError("no heap")


def test_the_peak_is_what_the_machine_allocates():
    """Of stage 3, layer by layer: symmetric memory, and what layers make of their own."""

    def rank(comm):
        options = {"zero": 3, "prefetch": 1, "start": "trust"}
        engine = DataParallel(wide(), CrossEntropy(), Mesh(comm, dp=2), **options)
        sample, rest = batches(1, size=2, sizes=(256, 256)), engine.ledger.total
        comm.barrier()
        before = heap_bytes()
        comm.barrier()
        tracemalloc.start()  # sees what is allocated from here on: not the states
        peaks = [engine.step(sample).peak_bytes - rest for _ in range(3)]
        comm.barrier()
        shared, private = heap_bytes() - before, tracemalloc.get_traced_memory()[1]
        return max(peaks), shared // 2, private

    for peak, shared, private in run_processes(2, rank):
        layer = 256 * 256 * ITEM
        assert 2 * layer < peak <= shared + private
        assert private <= layer + (1 << 17)  # these layers do not write where they are told
        assert shared <= 1.25 * peak + (1 << 17)  # blocks are rounded up


def test_the_ledger_sees_what_the_machine_sees():
    """Memory of the symmetric heap, and NumPy's own, against the ledger."""

    def rank(comm, zero):
        comm.barrier()
        tracemalloc.start()
        engine = DataParallel(wide(), CrossEntropy(), Mesh(comm, dp=2), zero=zero)
        peak = engine.step(batches(1, sizes=(256, 256))).peak_bytes
        gc.collect()
        comm.barrier()
        live = engine.ledger.live
        shared, private = heap_bytes(), tracemalloc.get_traced_memory()[0]
        both = comm.all_reduce(np.array([live["parameter"] + live["gradient"], peak]))
        return shared, *map(int, both), private, live["optimizer"]

    for zero in range(4):
        for shared, counted, peak, private, optimizer in run_processes(2, rank, zero):
            most = peak - 2 * optimizer  # blocks that were in use wait for the next step
            assert counted <= shared <= 1.25 * most + (1 << 20)  # and are rounded up
            assert optimizer <= private <= optimizer + (1 << 20)


def test_memory_goes_back_with_the_engine():
    def rank(comm):
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), optimizer=AdamW())
        engine.step(batches(1))
        ledger = engine.ledger
        engine.close()
        del engine
        return ledger.total

    assert run_threads(2, rank) == [0, 0]


def test_the_ledger_counts_rounds_up():
    from pycoll.parallel.channels import VOLUME

    assert VOLUME["all_reduce"](3, 10) == 14
    assert VOLUME["all_gather"](4, 16) == VOLUME["reduce_scatter"](4, 16) == 12


def test_the_page_tells_the_bytes_of_the_agreement():
    page = (Path(__file__).resolve().parents[3] / "docs" / "parallel.md").read_text("utf-8")
    norm = estimate(10, "fp32", {"dp": 2}, zero=0).wire["norm"]
    assert f"| 2 (W - 1) / W x {norm} |" in page


def test_an_array_that_a_layer_gives_again_and_again_counts_once():
    ledger, array = Ledger(), np.zeros(10)
    for _ in range(3):
        assert ledger.track(array, "layer gradient") is array
    assert ledger.total == ledger.peak == 80
    del array
    assert ledger.total == 0
