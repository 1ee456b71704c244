"""Bad input gets an error on every rank, which names the parameter and the ranks."""

import numpy as np
import pytest

from parallel.engine.test_data_parallel import digest
from parallel.models import CrossEntropy, Linear, batches, mlp
from pycoll.errors import ArgumentError, MismatchError, PeerLeft
from pycoll.parallel import AdamW, DataParallel, Mesh, ParameterSpec, Sequential
from pycoll.parallel.nn.containers import Chain
from pycoll.testing import run_threads


def refused(n, fn, *args, kind=ArgumentError):
    """Run ranks that all must raise; return their messages."""

    def rank(comm):
        with pytest.raises(kind) as caught:
            fn(comm, *args)
        comm.barrier()  # still usable
        return str(caught.value)

    return run_threads(n, rank)


def engine(comm, model=None, **options):
    return DataParallel(model or mlp(), CrossEntropy(), Mesh(comm, dp=-1), **options)


def test_parameters_that_differ_at_the_start():
    def rank(comm):
        layers = mlp().layers
        if comm.rank == 2:
            layers[2] = ("linear1", Linear(19, 11, seed=77))
        engine(comm, Sequential(layers))

    for text in refused(4, rank, kind=MismatchError):
        assert "parameter linear1.weight differs at the start: rank 2 of the data group" in text


def test_a_broadcast_makes_them_equal():
    def rank(comm):
        layers = mlp().layers
        layers[0] = ("linear0", Linear(7, 19, seed=comm.rank))
        return digest(engine(comm, Sequential(layers), start="broadcast", zero=3).gather())

    def reference(comm):
        return digest(engine(comm).gather())

    assert set(run_threads(3, rank)) == set(run_threads(1, reference))


def test_a_broadcast_leaves_the_arrays_of_the_caller_alone():
    def rank(comm):
        mine = np.full((4, 4), float(comm.rank), np.float32)
        mine.flags.writeable = False  # as those of a mapped file

        class Loaded(Linear):
            def parameters(self):
                return {"weight": ParameterSpec(self.shape, init=lambda _: mine)}

        trainer = engine(comm, Sequential([("a", Loaded(4, 4, 0))]), start="broadcast")
        return trainer.gather()["a.weight"].max(), mine.min()

    assert run_threads(2, rank) == [(0, 0), (0, 1)]


def test_models_that_differ():
    def rank(comm):
        engine(comm, mlp((7, 19 + (comm.rank == 1), 11, 5)))

    for text in refused(3, rank, kind=MismatchError):
        assert "ranks 0, 2: linear0.weight of shape (7, 19)" in text
        assert "rank 1: linear0.weight of shape (7, 20)" in text


def test_settings_that_differ():
    def rank(comm):
        engine(comm, zero=comm.rank)

    for text in refused(2, rank, kind=MismatchError):
        assert "rank 0: zero=0; rank 1: zero=1" in text


@pytest.mark.parametrize("rates", [[0.1, 0.2, 0.3], [0.1, None, 0.1], [0.1, 0.1, 0.1]])
def test_learning_rates_that_differ(rates):
    def rank(comm):
        trainer = engine(comm, optimizer=AdamW(lr=0.2))
        before = digest(trainer.gather())
        if len(set(rates)) == 1:
            assert not trainer.step(batches(1), rates[comm.rank]).skipped
            raise MismatchError("none")
        try:
            trainer.step(batches(1), rates[comm.rank])
        finally:
            assert digest(trainer.gather()) == before
            trainer.step(batches(1))  # goes on

    three, two = "rank 0: lr=0.1; rank 1: lr=0.2; rank 2: lr=0.3", "ranks 0, 2: lr=0.1; rank 1"
    text = [None, "none", two, three][len(set(rates))]
    for told in refused(3, rank, kind=MismatchError):
        assert text in told


@pytest.mark.parametrize("zero", range(4))
def test_gradients_that_are_not_finite(zero):
    def rank(comm):
        trainer = engine(comm, zero=zero)
        before = digest(trainer.gather())
        sample = batches(3)[comm.rank]
        if comm.rank == 1:
            sample[0][0, 0] = np.nan
        try:
            with np.errstate(invalid="ignore"):
                trainer.step([sample])
        finally:
            assert digest(trainer.gather()) == before
            trainer.step(batches(1))  # goes on

    for text in refused(3, rank):
        start = "the step was not taken: rank 1 has gradients that are not finite, of "
        assert text.startswith(start)
        assert "linear0.weight" in text
        assert "rank 0" not in text


def test_gradients_that_are_not_finite_can_be_skipped():
    def rank(comm):
        trainer = engine(comm, nonfinite="skip")
        x, t = batches(1)[0]
        with np.errstate(invalid="ignore"):
            skipped = trainer.step([(x * np.float32(np.nan), t)])
        return skipped.skipped, skipped.grad_norm, trainer.steps, trainer.step([(x, t)]).skipped

    assert run_threads(2, rank) == [(True, float("inf"), 0, False)] * 2


class Fickle(Linear):
    """Its bias has no gradient from the second call on."""

    calls = 0

    def backward_weight(self, params, saved, dy):
        found = super().backward_weight(params, saved, dy)
        self.calls += 1
        return found if self.calls == 1 else {"weight": found["weight"]}


@pytest.mark.parametrize("zero", range(4))
def test_a_changed_graph(zero):
    def rank(comm):
        kind = Fickle if comm.rank == 1 else Linear
        model = Sequential([("only", kind(7, 5, 0))])
        trainer = engine(comm, model, unused="error", zero=zero)
        trainer.step(batches(1))
        trainer.step(batches(1))

    for text in refused(2, rank):
        assert "the step was not taken: rank 1 has a changed graph: in micro-batch 0" in text
        assert "only.bias" in text


class Odd(Linear):
    given = ("weight", 3)

    def backward_weight(self, params, saved, dy):
        name, extra = self.given
        return {name: np.zeros((saved.shape[1], dy.shape[1] + extra), np.float32)}


class Stranger(Odd):
    given = ("wait", 0)


class Forgetful(Linear):
    def backward_weight(self, params, saved, dy):
        super().backward_weight(params, saved, dy)  # and no return


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Odd, "the gradient of a.weight has shape (7, 8), the parameter has (7, 5)"),
        (Stranger, "layer a gave gradients of wait, which are not among its parameters: weight"),
        (Forgetful, "layer a gave None as its gradients; expected a dict, by name"),
    ],
)
def test_gradients_that_fit_no_parameter(kind, text):
    def rank(comm):
        engine(comm, Sequential([("a", kind(7, 5, 0))])).step(batches(1))

    assert text in refused(1, rank)[0]


class Split(Linear):
    def parameters(self):
        return {"weight": ParameterSpec(self.shape, tensor_axis=1)}


def tied(outputs, tied_to):
    layers = [("a", Linear(4, 4, 0)), ("b", Linear(4, outputs, 0, tied_to=tied_to))]
    return lambda: Sequential(layers)


def split_once(what, value):
    class Tied(Linear):
        def parameters(self):
            return {"weight": ParameterSpec(self.shape, tied_to="a.weight", **{what: value})}

    return lambda: Sequential([("a", Linear(4, 4, 0)), ("b", Tied(4, 4, 0))])


def named(*layers):
    return lambda: Sequential([(name, Chain((inner, Linear(4, 4, 0)))) for name, inner in layers])


def twice(kind):
    return lambda: Sequential([("a", kind(4, 4, 0))] * 2)


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (lambda: Sequential([("a", Split(4, 4, 0))]), {}, "a.weight is split over tp"),
        (lambda: [("a", Linear(4, 4, 0))], {}, "the model is a list; expected a chain of named"),
        (lambda: Sequential([Linear(4, 4, 0)]), {}, "layer 0 of the model is <parallel."),
        (lambda: Sequential([("a", Linear)]), {}, "layer 0 of the model is ('a', <class"),
        (twice(Linear), {}, "two layers of the model are named 'a'"),
        (named(("a", "b.c"), ("a.b", "c")), {}, "layers 'a' and 'a.b' both have a parameter"),
        (tied(4, "c.weight"), {}, "b.weight is tied to c.weight, which owns no values"),
        (split_once("sequence", True), {}, "b.weight has sequence=True, but a.weight, which it is"),
        (split_once("tensor_axis", 1), {}, "b.weight has tensor_axis=1, but a.weight"),
        (tied(5, "a.weight"), {}, "b.weight has shape (4, 5), but a.weight"),
        (mlp, {"zero": 4}, "zero=4"),
        (mlp, {"order": "random"}, "order='random' is not known"),
        (mlp, {"start": "guess"}, "start='guess'"),
        (mlp, {"precision": "fp8"}, "precision='fp8'"),
    ],
)
def test_what_cannot_be_trained_is_refused(model, options, text):
    for message in refused(2, lambda comm: engine(comm, model(), **options)):
        assert text in message


@pytest.mark.parametrize("loss", [None, CrossEntropy])
def test_what_is_no_loss_is_refused(loss):
    told = refused(1, lambda comm: DataParallel(mlp(), loss, Mesh(comm, dp=-1)))[0]
    assert f"loss={loss!r}; expected a loss, such as CrossEntropy()" in told


class Unreadable(Linear):
    def parameters(self):
        missing = ParameterSpec(self.shape, init=lambda shape: np.load("/no/such/file"))
        return super().parameters() | {"weight": missing}


@pytest.mark.parametrize(
    ("layer", "loss", "text"),
    [
        (Linear, CrossEntropy, "left: ArgumentError: loss=<class"),
        (Unreadable, CrossEntropy(), "left: FileNotFoundError: .*/no/such/file"),
    ],
)
def test_others_hear_why_one_rank_makes_no_engine(layer, loss, text):
    def rank(comm):
        kind = layer if comm.rank == 1 else Linear
        model = Sequential([("a", kind(2, 2, 0))])
        mesh = Mesh(comm, dp=-1)
        if comm.rank == 1:
            with pytest.raises((ArgumentError, FileNotFoundError)), mesh, comm:
                DataParallel(model, loss, mesh)
        else:
            with pytest.raises(PeerLeft, match=text):
                DataParallel(model, CrossEntropy(), mesh)

    run_threads(2, rank)


def test_a_communicator_is_no_mesh():
    told = refused(1, lambda comm: DataParallel(mlp(), CrossEntropy(), comm))[0]
    assert "rank 0 of 1>; expected a mesh, such as Mesh(comm, dp=-1)" in told


def test_a_wrong_initial_value_is_refused():
    class Wrong(Linear):
        def parameters(self):
            return {"weight": ParameterSpec(self.shape, init=lambda shape: np.zeros(3))}

    text = refused(1, lambda comm: engine(comm, Sequential([("a", Wrong(2, 2, 0))])))[0]
    assert "a.weight has shape (2, 2), its initial value (3,)" in text


def test_a_step_without_samples_is_refused():
    assert "no rank has a micro-batch" in refused(2, lambda comm: engine(comm).step([]))[0]


def test_a_saved_state_must_fit():
    def rank(comm):
        trainer = engine(comm)
        saved = trainer.state_dict()
        saved["parameters"]["linear0.bias"] = np.zeros(4)
        with pytest.raises(ArgumentError, match=r"linear0.bias has shape \(19,\), saved is \(4,\)"):
            trainer.load_state_dict(saved)
        del saved["first_moment"]["linear2.weight"]
        saved["parameters"]["linear0.bias"] = np.zeros(19)
        with pytest.raises(ArgumentError, match="no first_moment of parameter linear2"):
            trainer.load_state_dict(saved)

    run_threads(1, rank)


@pytest.mark.parametrize("zero", range(4))
def test_a_rank_that_fails_in_a_layer_is_an_error_on_all(zero, run):
    class Fails(Linear):
        def backward_weight(self, params, saved, dy):
            raise ZeroDivisionError("rank 1 stumbles")

    def rank(comm):
        kind = Fails if comm.rank == 1 else Linear
        model = Sequential([("a", Linear(7, 9, 0)), ("b", kind(9, 5, 1))])
        with (
            pytest.raises(ZeroDivisionError if comm.rank == 1 else ArgumentError, match="stumbles"),
            Mesh(comm, dp=-1) as mesh,
            DataParallel(model, CrossEntropy(), mesh, zero=zero) as trainer,
        ):
            trainer.step(batches(1))

    run(3, rank)
