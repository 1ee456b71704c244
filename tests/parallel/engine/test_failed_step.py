"""A step that has raised on every rank, or on one, leaves nothing behind that changes the next."""

import threading
import time

import numpy as np
import pytest

from parallel.models import CrossEntropy, Linear, batches
from pycoll.errors import ArgumentError, PeerLeft
from pycoll.parallel import SGD, DataParallel, Mesh, Pipeline, Sequential
from pycoll.parallel.channels import Pending
from pycoll.parallel.state.hook import Hook
from pycoll.testing import run_threads

SIZES = (7, 19, 5)


class Late(Pending):
    """A reduction that is slow: it reads and writes its arrays only after a while."""

    def __init__(self, reduce):
        self._found = []
        self._thread = threading.Thread(target=self._run, args=(reduce,), daemon=True)
        self._thread.start()

    def _run(self, reduce):
        time.sleep(0.3)
        self._found.append(reduce())

    def done(self):
        return not self._thread.is_alive()

    def wait(self):
        self._thread.join(10)
        return self._found[0]


class SlowAtFirst(Hook):
    """Is slow with the first bucket, which has a communicator of its own."""

    def __init__(self, comm):
        self._comms = [comm]

    def all_reduce(self, key, data, *rest):
        if not self._comms:
            return super().all_reduce(key, data, *rest)
        comm = self._comms.pop()
        return Late(lambda: comm.all_reduce(data, out=data))

    def reduce_scatter(self, key, data, out, *rest):
        if not self._comms:
            return super().reduce_scatter(key, data, out, *rest)
        comm = self._comms.pop()
        return Late(lambda: comm.reduce_scatter(data, out=out))


class Stumbling(Linear):
    stumbles = False

    def backward_weight(self, params, saved, dy):
        if self.stumbles:
            raise ValueError("a bad batch")
        return super().backward_weight(params, saved, dy)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_reduction_that_a_failed_step_has_started(zero):
    def rank(comm, fails):
        first, last = Stumbling(*SIZES[:2], seed=0), Linear(*SIZES[1:], seed=1)
        model = Sequential([("first", first), ("last", last)])
        options = {"zero": zero, "bucket_bytes": 256, "optimizer": SGD(0.1)}
        options["hook"] = SlowAtFirst(comm.dup())
        with DataParallel(model, CrossEntropy(), Mesh(comm, dp=-1), **options) as engine:
            samples = batches(2, sizes=SIZES)
            for first.stumbles in (True, False) if fails else (False,):
                try:  # the gradients of `last` are on their way when `first` stumbles
                    engine.step(samples[comm.rank :][:1])
                except ValueError:
                    assert first.stumbles
            return engine.gather()

    wanted = run_threads(2, rank, False)
    for found, want in zip(run_threads(2, rank, True), wanted, strict=True):
        for name, value in want.items():
            np.testing.assert_array_equal(found[name], value)


class Failing(Linear):
    """Raises in one of its calls, from the second micro-batch on."""

    where, calls = "", 0

    def _stumble(self, call):
        if call == self.where:
            self.calls += 1
            if self.calls == 2:
                raise ValueError("a bad batch")

    def forward(self, params, x):
        self._stumble("forward")
        return super().forward(params, x)

    def backward_input(self, params, saved, dy):
        self._stumble("backward_input")
        return super().backward_input(params, saved, dy)

    def backward_weight(self, params, saved, dy):
        self._stumble("backward_weight")
        found = super().backward_weight(params, saved, dy)
        return {"weight": found["bias"]} if self.where == "shape" else found


class Read(list):
    """Micro-batches of which one cannot be read."""

    def __getitem__(self, i):
        if i == 1:
            raise ValueError("a bad batch")
        return super().__getitem__(i)


WHERE = ("forward", "backward_input", "backward_weight", "shape", "read")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"recompute": 2, "offload": "all"}])
def test_a_rank_that_fails_alone(zero, more):
    """The others hear of it at once, nobody takes the step, and all go on."""

    def rank(comm, *kinds):
        layers = [Linear(*SIZES[:2], seed=0), Failing(19, 19, seed=1), Linear(*SIZES[1:], seed=2)]
        model = Sequential([(f"layer{i}", layer) for i, layer in enumerate(layers)])
        options = {"zero": zero, "bucket_bytes": 256, "optimizer": SGD(0.1, momentum=0.9), **more}
        with DataParallel(model, CrossEntropy(), Mesh(comm, dp=-1), **options) as engine:
            samples = batches(9, sizes=SIZES)[comm.rank :: 3]
            for layers[1].where in (*kinds, ""):
                layers[1].calls = 0
                if not layers[1].where:
                    engine.step(samples)
                elif comm.rank == 1:
                    read = Read(samples) if layers[1].where == "read" else samples
                    with pytest.raises(ValueError, match=r"a bad batch|has shape"):
                        engine.step(read)
                else:
                    layers[1].where = ""
                    text = "not taken: rank 1 has (Value|Argument)Error: (a bad batch|.*has shape)"
                    with pytest.raises(ArgumentError, match=text):
                        engine.step(samples)
            return engine.steps, engine.gather()

    (_, wanted), *_ = run_threads(3, rank)
    for steps, found in run_threads(3, rank, *WHERE):
        assert steps == 1
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_whose_prediction_fails(zero):
    """It raises, and has no output of the layers before; the others have theirs."""

    def rank(comm):
        layers = [Linear(*SIZES[:2], seed=0), Failing(19, 19, seed=1), Linear(*SIZES[1:], seed=2)]
        model = Sequential([(f"layer{i}", layer) for i, layer in enumerate(layers)])
        options = {"zero": zero, "bucket_bytes": 256, "optimizer": SGD(0.1)}
        with DataParallel(model, CrossEntropy(), Mesh(comm, dp=-1), **options) as engine:
            ((x, _),) = batches(1, sizes=SIZES)
            wanted = engine.predict(x)
            layers[1].where, layers[1].calls = "forward" if comm.rank == 1 else "", 1
            if comm.rank == 1:
                with pytest.raises(ValueError, match="a bad batch"):
                    engine.predict(x)
            else:
                np.testing.assert_array_equal(engine.predict(x), wanted)
            np.testing.assert_array_equal(engine.predict(x), wanted)

    run_threads(3, rank)


def test_a_stage_whose_prediction_fails():
    def rank(comm):
        last = Failing(19, 5, seed=1)
        model = Sequential([("first", Linear(*SIZES[:2], seed=0)), ("last", last)])
        engine = Pipeline(model, CrossEntropy(), Mesh(comm, pp=2), micro_batches=2)
        last.where, last.calls = "forward", 1
        error = ValueError if comm.rank == 1 else PeerLeft
        with pytest.raises(error, match="a bad batch"):
            engine.predict(batches(1, sizes=SIZES)[0][0])
        comm.barrier()  # all heard of it while the rank that failed was still there

    run_threads(2, rank)


@pytest.mark.parametrize("kind", [DataParallel, Pipeline])
def test_a_layer_whose_ranks_wait_for_each_other(kind):
    """They hear of the error inside of the layer: the engine ends."""

    class Last(Linear):
        def forward(self, params, x):
            if self.seed:
                raise ValueError("a bad batch")
            return super().forward(params, x)

    class Split(Linear):
        def forward(self, params, x):
            self.comm.all_reduce(x)
            return super().forward(params, x)

    def rank(comm):
        mesh = Mesh(comm, dp=2, tp=2)
        last = Last(*SIZES[1:], seed=0)
        layers = [("first", Linear(*SIZES[:2], seed=0)), ("last", last)]
        layers.insert(2, ("split", Split(5, 5, seed=0)))
        layers[2][1].comm = mesh.tp
        more = {"micro_batches": 2} if kind is Pipeline else {}
        engine = kind(Sequential(layers), CrossEntropy(), mesh, **more)
        last.seed = comm.rank == 3
        error, text = (ValueError, "bad") if last.seed else (PeerLeft, "ValueError: a bad batch")
        with pytest.raises(error, match=text):
            engine.step(batches(2, sizes=SIZES))
        comm.barrier()  # all heard of it while the rank that failed was still there

    run_threads(4, rank)
