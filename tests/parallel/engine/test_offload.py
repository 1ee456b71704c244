"""Activations and states of the optimizer in a file: the same bits, and errors on every rank."""

import mmap
import os
import resource
import signal
import tracemalloc
from functools import partial

import numpy as np
import pytest

from pycoll.errors import ArgumentError, PeerLost
from pycoll.parallel import AdamW, DataParallel, Mesh, Pipeline, estimate
from pycoll.parallel.channels import Ledger
from pycoll.parallel.engine.offload import Offloaded
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn import CrossEntropy, Linear, ReLU, Sequential, TransformerConfig
from pycoll.parallel.nn.layer import NoParameters
from pycoll.parallel.precision import LossScale
from pycoll.parallel.random import Cursor, Key
from pycoll.parallel.state import states
from pycoll.parallel.state.storage import PAGE, Storage
from pycoll.testing import run_processes, run_threads

WIDTH, BATCH = 48, 32


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(states, "PART_BYTES", PAGE)


def model(depth=4):
    key = Key(0)
    layers = []
    for i in range(depth):
        layers += [(f"linear{i}", Linear(WIDTH, WIDTH, key.fold(str(i)))), (f"relu{i}", ReLU())]
    return Sequential(layers)


def batch(step, place, m):
    rng = np.random.default_rng([step, place])
    x = [rng.standard_normal((BATCH, WIDTH)).astype("f4") for _ in range(m)]
    return [(each, rng.integers(0, WIDTH, BATCH)) for each in x]


def trained(ranks, steps, **options):
    return run_threads(ranks, partial(train, steps=steps, **options))


def train(comm, steps, pp=1, schedule="1f1b", m=3, **options):
    """Return losses, parameters and states, by name."""
    more = {"optimizer": AdamW(lr=1e-2), "bucket_bytes": 30_000, **options}
    with Mesh(comm, dp=-1, pp=pp) as mesh:
        parts = model(), CrossEntropy(), mesh
        make = DataParallel if pp == 1 else lambda *p, **o: Pipeline(*p, schedule, m, **o)
        with make(*parts, **more) as engine:
            found = [
                engine.step(batch(s, mesh.coordinate("dp"), m), lr=1e-2).loss for s in range(steps)
            ]
            return found, engine.state_dict(), dict(engine.ledger.stored)


def same(found, expected):
    assert repr(found[0]) == repr(expected[0])
    for kind in ("parameters", *AdamW().slots):
        for name, value in expected[1][kind].items():
            assert found[1][kind][name].tobytes() == value.tobytes(), (kind, name)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_fifty_steps_have_the_same_bits(zero):
    more = {"precision": ("fp32", "bf16")[zero % 2], "recompute": ("none", 2)[zero // 2]}
    expected = trained(2, 50, zero=zero, **more)
    found = trained(2, 50, zero=zero, offload="all", **more)
    for each, other in zip(found, expected, strict=True):
        same(each, other)
        assert each[2]["optimizer"] >= 2 * 4 * 4 * WIDTH * WIDTH // (2 if zero else 1)
        assert each[2]["activation"] == 0


@pytest.mark.parametrize(
    ("dp", "schedule", "offload", "zero"),
    [
        (1, "1f1b", "all", 1),
        (1, "zb_h1", "activations", 0),
        (1, "pipedream", "all", 0),
        (2, "1f1b", "optimizer", 2),
        (2, "zb_v", "all", 3),
    ],
)
def test_pipelines_have_the_same_bits(dp, schedule, offload, zero):
    steps = 50 if schedule == "1f1b" else 5
    more = {"pp": 2, "schedule": schedule, "zero": zero}
    expected = trained(2 * dp, steps, **more)
    for each in trained(2 * dp, steps, offload=offload, **more):
        same(each, expected[0])


def test_attention_has_the_same_bits():
    """Its arrays are views of others, with axes in another order."""

    def rank(comm, offload, recompute):
        cursor = Cursor()
        shape = {"vocabulary": 32, "features": 32, "heads": 2, "depth": 2, "length": 16}
        network = GPT(TransformerConfig(**shape, dropout=0.1, cursor=cursor), seed=1)
        rng = np.random.default_rng(0)
        with (
            Mesh(comm, dp=-1) as mesh,
            DataParallel(
                network, network.loss(), mesh, offload=offload, recompute=recompute
            ) as engine,
        ):
            for step in range(3):
                tokens = rng.integers(0, 32, (4, 17))
                cursor.at(step, 0)
                engine.step([(tokens[:, :-1], tokens[:, 1:])] * 2)
            return engine.gather()

    for recompute in ("none", "selective", "full"):
        (expected,) = run_threads(1, rank, "none", recompute)
        (found,) = run_threads(1, rank, "activations", recompute)
        for name, value in expected.items():
            assert found[name].tobytes() == value.tobytes()


def test_arrays_come_back_as_they_were():
    storage, ledger = Storage(None), Ledger()
    kept = Offloaded(storage, ledger)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 30, 8)).astype("f4")
    whole = np.moveaxis(x, 1, 2)
    saved = {
        "views": (x[:, :10], x[:, 10:20], whole, x.T, x[::-1]),
        "far": [rng.standard_normal((100, 10, 90))[:, 3]],  # of a larger array: stays
        "small": np.ones(3),
        "none": None,
        "flags": x > 0,
    }
    packed = kept.put(saved)
    assert ledger.stored["activation"] == x.nbytes + x.size  # x once, flags
    for _ in range(2):
        kept.fetch(packed)
        found = kept.take(packed)
        for key in ("views", "far"):
            for one, other in zip(found[key], saved[key], strict=True):
                np.testing.assert_array_equal(one, other)
                assert (one.strides, one.dtype) == (other.strides, other.dtype)
        assert found["small"] is saved["small"]
        assert found["none"] is None
        np.testing.assert_array_equal(found["flags"], saved["flags"])
    assert found["far"][0] is saved["far"][0]
    del packed, found
    assert ledger.stored["activation"] == 0
    storage.close()


class Reads(Storage):
    """A file that counts what is read."""

    count = 0

    def read(self, into, start):
        self.count += 1
        super().read(into, start)


def test_what_is_in_memory_follows_from_the_order_of_the_calls():
    storage, ledger = Reads(None), Ledger()
    kept, size = Offloaded(storage, ledger), 8192
    packed = []

    def live():
        return ledger.live["activation"] // size

    for i in range(5):
        packed.append(kept.put([np.full(size // 8, float(i))]))
        assert live() == min(i + 1, 2)
    assert ledger.peaks["activation"] == 3 * size  # one more, until the oldest is written
    assert kept.take(packed[4])[0][0] == 4
    assert storage.count == 0  # it has not left
    kept.fetch(packed[0])
    assert live() == 3
    assert kept.take(packed[0])[0][0] == 0
    assert storage.count == 1
    for left, there in ((4, 2), (3, 1), (2, 1), (1, 1), (0, 0)):  # the first one is still used
        packed.pop()
        assert (ledger.stored["activation"] // size, live()) == (left, there)
    storage.close()


def test_what_a_layer_has_changed_is_written_again():
    kept = Offloaded(Storage(None), Ledger())
    packed = kept.put([np.zeros(1024)])
    found = kept.take(packed)
    found[0] += 1
    again = kept.put(found)
    del packed, found
    for _ in range(3):
        kept.put([np.ones(1024)])
    assert (kept.take(again)[0] == 1).all()


def test_other_memory_at_an_address_is_no_block_that_was_there():
    pages = mmap.mmap(-1, 2 * PAGE)
    kept = Offloaded(Storage(None), Ledger())
    first = kept.put([np.frombuffer(pages)])
    for _ in range(3):
        kept.put([np.ones(1024)])
    kept.fetch(first)  # it is in memory again, elsewhere
    pages[:8] = np.ones(1).tobytes()
    second = kept.put([np.frombuffer(pages)])
    assert [kept.take(each)[0][0] for each in (first, second)] == [0, 1]


def test_what_stays_counts_once():
    ledger = Ledger()
    kept, x = Offloaded(Storage(None), ledger), np.zeros((4, 512))
    first, second = kept.stay((x, x[1:], [x.T])), kept.stay({"x": x, "few": np.zeros(2)})
    assert ledger.live["activation"] == x.nbytes + 16
    away = kept.put(x)  # the same memory, which now goes
    assert ledger.live["activation"] == x.nbytes + 16
    assert ledger.stored["activation"] == x.nbytes
    assert kept.take(first)[0] is x
    del first, second
    assert ledger.live["activation"] == x.nbytes
    del away
    assert not ledger.live["activation"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "fp16_copy"])
def test_memory_is_what_is_estimated(zero, precision):
    options = {"zero": zero, "precision": precision, "offload": "optimizer", "bucket_bytes": 30_000}
    options["loss_scale"] = LossScale(1.0)

    def rank(comm):
        with (
            Mesh(comm, dp=-1) as mesh,
            DataParallel(model(), CrossEntropy(), mesh, **options) as engine,
        ):
            rest = engine.ledger.live["optimizer"], engine.ledger.stored["optimizer"]
            peaks = [engine.step(batch(s, comm.rank, 2)).peak_bytes for s in range(2)]
            return *rest, max(peaks)

    expected = estimate(model(), None, {"dp": 2}, micro_batches=2, **options)
    before = estimate(model(), None, {"dp": 2}, micro_batches=2, **options | {"offload": "none"})
    for live, stored, peak in run_threads(2, rank):
        assert live == expected.optimizer == 0
        assert stored == expected.stored == before.optimizer
        assert peak == pytest.approx(expected.peak, rel=0.01)
        assert peak <= before.peak - before.optimizer + 10 * PAGE


class Keeps(NoParameters):
    """A layer that needs its input."""

    def forward(self, params, x):
        return x + 1, (x,)

    def backward_input(self, params, saved, dy):
        return dy * (saved[0] > 0)


def test_activations_leave_the_memory():
    def rank(comm, offload):
        layers = [(f"keeps{i}", Keeps()) for i in range(16)]
        network = Sequential([("in", Linear(8, 8, Key(0))), *layers])
        x = np.ones((32_768, 8), "f4")
        with (
            Mesh(comm, dp=-1) as mesh,
            DataParallel(network, CrossEntropy(), mesh, offload=offload) as engine,
        ):
            tracemalloc.start()
            engine.step([(x, np.zeros(len(x), int))])
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak / x.nbytes

    (kept,), (offloaded,) = (run_threads(1, rank, kind) for kind in ("none", "activations"))
    assert kept > 16
    assert offloaded < kept - 10


def full(comm, directory):
    """Have no room on rank 1, then room again; return errors and parameters."""
    with (
        Mesh(comm, dp=-1) as mesh,
        DataParallel(
            model(), CrossEntropy(), mesh, offload="activations", offload_dir=directory
        ) as engine,
    ):
        free = resource.getrlimit(resource.RLIMIT_FSIZE)
        if comm.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3 * PAGE, free[1]))
        before = engine.gather()
        with pytest.raises(ArgumentError) as caught:
            engine.step(batch(0, comm.rank, 2))
        after = engine.gather()
        resource.setrlimit(resource.RLIMIT_FSIZE, free)
        assert all((before[name] == after[name]).all() for name in before)
        engine.step(batch(0, comm.rank, 2))
        return str(caught.value), engine.gather()


def test_a_full_disk_is_an_error_on_every_rank_and_changes_nothing(tmp_path):
    def plain(comm):
        with Mesh(comm, dp=-1) as mesh, DataParallel(model(), CrossEntropy(), mesh) as engine:
            engine.step(batch(0, comm.rank, 2))
            return engine.gather()

    expected = run_threads(2, plain)[0]
    for text, found in run_processes(2, full, str(tmp_path)):
        assert "the step was not taken: rank 1 has no room for" in text
        for name, value in expected.items():
            assert found[name].tobytes() == value.tobytes()


def test_a_directory_that_one_rank_lacks_is_an_error_on_every_rank(tmp_path):
    def rank(comm):
        place = str(tmp_path / ("" if comm.rank == 0 else "nowhere"))
        with (
            Mesh(comm, dp=-1) as mesh,
            pytest.raises(ArgumentError, match=r"offload='all': rank 1 has no room in offload_dir"),
        ):
            DataParallel(model(), CrossEntropy(), mesh, offload="all", offload_dir=place)

    run_threads(2, rank)


def test_nothing_is_left_of_the_file(tmp_path):
    def rank(comm):
        with (
            Mesh(comm, dp=-1) as mesh,
            DataParallel(
                model(), CrossEntropy(), mesh, offload="all", offload_dir=str(tmp_path)
            ) as engine,
        ):
            engine.step(batch(0, comm.rank, 2))
            assert not list(tmp_path.iterdir())
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(PeerLost):
                engine.step(batch(1, comm.rank, 2))

    run_processes(2, rank, may_die={1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload": "some"}, "offload='some' is not known; accepted: none, activations, opti"),
    ],
)
def test_what_is_refused(options, text):
    with pytest.raises(ArgumentError, match=text):
        estimate(model(), None, **options)
