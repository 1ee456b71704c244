"""Data parallelism times tensor parallelism: norms, gathered parameters, partial gradients."""

import numpy as np
import pytest

from parallel import serial
from parallel.models import CrossEntropy, Linear, Relu, batches, values
from pycoll.errors import MismatchError
from pycoll.parallel import (
    Compress,
    DataParallel,
    Mesh,
    ParameterSpec,
    PowerSGD,
    Sequential,
    TopK,
)
from pycoll.parallel.random import Key
from pycoll.parallel.tensor.layers import ColumnParallelLinear
from pycoll.testing import run_threads

SIZES = (7, 12, 5)


class Scale:
    """Multiplies by a vector; each rank of `tp` computes its share of the gradient's rows."""

    def __init__(self, count, tp=None):
        self.count, self.tp = count, tp

    def parameters(self):
        init = values(3, std=1.0)
        return {"gain": ParameterSpec((self.count,), init=init, sequence=self.tp is not None)}

    def forward(self, params, x):
        return x * params["gain"], x

    def backward_input(self, params, saved, dy):
        return dy * params["gain"]

    def backward_weight(self, params, saved, dy):
        rows = slice(None) if self.tp is None else slice(self.tp.rank, None, self.tp.world_size)
        return {"gain": (saved * dy)[rows].sum(axis=0)}


class Column(Linear):
    """Its outputs divided over `tp`; gradients of the input are added."""

    def __init__(self, inputs, outputs, seed, tp):
        super().__init__(inputs, outputs, seed)
        self.tp = tp

    def parameters(self):
        n, r, full = self.tp.world_size, self.tp.rank, self.shape
        weight = np.split(values(self.seed)(full), n, 1)[r]
        return {
            "weight": ParameterSpec(weight.shape, init=lambda _: weight, tensor_axis=1),
            "bias": ParameterSpec((full[1] // n,), decay=False, tensor_axis=0),
        }

    def backward_input(self, params, saved, dy):
        return self.tp.all_reduce(super().backward_input(params, saved, dy))


class Row(Linear):
    """Its inputs divided over `tp`; outputs are added, the bias is added once."""

    def __init__(self, inputs, outputs, seed, tp):
        super().__init__(inputs, outputs, seed)
        self.tp = tp

    def parameters(self):
        n, r = self.tp.world_size, self.tp.rank
        weight = np.split(values(self.seed)(self.shape), n, 0)[r]
        return {
            "weight": ParameterSpec(weight.shape, init=lambda _: weight, tensor_axis=0),
            "bias": ParameterSpec(self.shape[1:], decay=False),
        }

    def forward(self, params, x):
        return self.tp.all_reduce(x @ params["weight"]) + params["bias"], x


def whole():
    first, last = Linear(7, 12, 0), Linear(12, 5, 1)
    return Sequential([("s", Scale(7)), ("a", first), ("relu", Relu()), ("b", last)])


def split(tp):
    first, last = Column(7, 12, 0, tp), Row(12, 5, 1, tp)
    return Sequential([("s", Scale(7, tp)), ("a", first), ("relu", Relu()), ("b", last)])


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"tp": 4}, {"replica": 2, "dp": 2, "tp": 2}])
def test_every_mesh_gives_the_numbers_of_one_process(axes, zero):
    data = [batches(4, sizes=SIZES, seed=step) for step in range(20)]
    params, log = serial.train(whole(), CrossEntropy(), data, serial.AdamW(), serial.tree, clip=0.3)

    def rank(comm):
        mesh = Mesh(comm, **axes)
        engine = DataParallel(split(mesh.tp), CrossEntropy(), mesh, zero=zero, clip_norm=0.3)
        r, k = engine.groups.data.rank, 4 // engine.groups.data.world_size
        found = []
        for batch in data:
            report = engine.step(batch[r * k : (r + 1) * k])
            found.append((report.loss, report.grad_norm))
        return engine.gather(), found

    for gathered, found in run_threads(int(np.prod(list(axes.values()))), rank):
        np.testing.assert_allclose(found, log, rtol=2e-5)
        assert gathered.keys() == params.keys()
        for name, value in params.items():
            np.testing.assert_allclose(gathered[name], value, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "make", [lambda: Compress("float16"), lambda: TopK(0.2), lambda: PowerSGD(1)]
)
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"replica": 2, "tp": 2}, {"tp": 2}])
def test_hooks_leave_the_ranks_of_tp_alike(axes, make):
    data = [batches(2, sizes=SIZES, seed=step) for step in range(8)]

    def rank(comm):
        mesh = Mesh(comm, **axes)
        engine = DataParallel(split(mesh.tp), CrossEntropy(), mesh, zero=1, hook=make())
        assert len(engine.buckets) == 1  # of parameters that are split and others that are not
        for batch in data:
            engine.step([batch[engine.groups.data.rank]])
        return engine.gather()

    first, *others = run_threads(int(np.prod(list(axes.values()))), rank)
    for found in others:
        for name, value in first.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_states_move_between_meshes():
    data = [batches(4, sizes=SIZES, seed=step) for step in range(6)]

    def first(comm):
        engine = DataParallel(whole(), CrossEntropy(), Mesh(comm, dp=4), zero=3)
        for batch in data[:3]:
            engine.step([batch[comm.rank]])
        return engine.state_dict()

    saved = run_threads(4, first)[0]

    def resume(comm, axes, zero, steps):
        mesh = Mesh(comm, **axes)
        model = split(mesh.tp) if "tp" in axes else whole()
        engine = DataParallel(model, CrossEntropy(), mesh, zero=zero)
        engine.load_state_dict(saved)
        r, k = engine.groups.data.rank, 4 // engine.groups.data.world_size
        for batch in data[3:][:steps]:
            engine.step(batch[r * k : (r + 1) * k])
        return engine.state_dict()

    for axes, zero in [({"dp": 1}, 0), ({"dp": 2, "tp": 2}, 1), ({"tp": 2}, 2), ({"dp": 2}, 1)]:
        n = int(np.prod(list(axes.values())))
        for found in run_threads(n, resume, axes, zero, 0):
            for key in ("parameters", "first_moment", "second_moment"):
                for name, value in saved[key].items():
                    np.testing.assert_array_equal(found[key][name], value)
    straight = run_threads(4, resume, {"dp": 4}, 0, 3)[0]
    for axes, zero in [({"dp": 1}, 0), ({"dp": 2}, 1)]:
        found = run_threads(int(np.prod(list(axes.values()))), resume, axes, zero, 3)[0]
        assert found["steps"] == 6
        for name, value in straight["parameters"].items():
            np.testing.assert_array_equal(found["parameters"][name], value)


def test_copies_over_tp_are_checked():
    def rank(comm):
        mesh = Mesh(comm, tp=2)
        model = split(mesh.tp)
        model.layers[3][1].parameters = lambda: {
            "weight": ParameterSpec((6, 5), tensor_axis=0),
            "bias": ParameterSpec((5,), init=lambda shape: np.full(shape, comm.rank, "float32")),
        }
        with pytest.raises(MismatchError, match=r"b\.bias differs at the start: rank 1 of the tp"):
            DataParallel(model, CrossEntropy(), mesh)

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("layer", "name"), [("own", "a.weight"), ("tied", "b.weight"), ("small", "a.weight")]
)
def test_a_single_layer_on_other_ranks_than_those_of_tp(layer, name):
    """Of another size, of another axis or tied: every rank hears which parameter, and who."""

    def rank(comm):
        mesh = Mesh(comm, dp=2, tp=4 if layer == "small" else 2)
        other = mesh.group("dp")
        key, right = Key(0).fold("layer"), mesh.tp
        first = ColumnParallelLinear(8, 8, key, right if layer == "tied" else other)
        tied_to = "a.weight" if layer == "tied" else None
        last = ColumnParallelLinear(8, 8, key, other, bias=False, tied_to=tied_to)
        with pytest.raises(MismatchError, match=f"parameter {name} differs from the mesh") as told:
            DataParallel(
                Sequential([("a", first), ("b", last)]), CrossEntropy(), mesh, start="trust"
            )
        comm.barrier()  # still usable
        return str(told.value)

    texts = run_threads(8 if layer == "small" else 4, rank)
    assert len(set(texts)) == 1
    assert "on rank 1; parameter" in texts[0] or layer == "small"


@pytest.mark.parametrize("start", ["check", "trust"])
def test_a_layer_in_the_right_places_with_other_partners(start):
    def rank(comm):
        mesh = Mesh(comm, dp=2, tp=2)
        other = comm.split(comm.rank in (0, 3), comm.rank % 2)
        assert (other.rank, other.world_size) == (mesh.tp.rank, mesh.tp.world_size)
        layer = ColumnParallelLinear(8, 8, Key(0).fold("layer"), other)
        with pytest.raises(MismatchError) as told:
            DataParallel(Sequential([("a", layer)]), CrossEntropy(), mesh, start=start)
        comm.barrier()  # still usable
        return str(told.value)

    (text,) = set(run_threads(4, rank))
    head = "parameter a.weight differs from the mesh: split over ranks"
    assert text.startswith(f"{head} 0, 3 in place of ranks 0, 1 along tp, on rank 0; {head} 2, 1 ")
