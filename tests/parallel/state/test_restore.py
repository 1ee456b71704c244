"""Saved states go back as a whole, or not at all."""

import copy

import numpy as np
import pytest

from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel import AdamW, DataParallel, Hook, LossScale, Mesh, PowerSGD, TopK
from pycoll.testing import run_threads


def engine(comm, **options):
    options = {"bucket_bytes": 256, "optimizer": AdamW(), "loss_scale": LossScale(8.0), **options}
    return DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1), **options)


def flat(value):
    """Return a saved state as pairs of path and bytes, in a fixed order."""
    if isinstance(value, dict):
        return [(f"{k}/{p}", x) for k in sorted(value) for p, x in flat(value[k])]
    return [("", np.asarray(value).tobytes())]


def without(group, name):
    def spoil(saved):
        del saved[group][name]

    return spoil


def put(group, name, value):
    def spoil(saved):
        (saved if group is None else saved[group])[name] = value

    return spoil


def drop(name):
    return lambda saved: saved.pop(name)


class Unreadable:
    """What PyTorch's tensors that require a gradient are to NumPy, and other arrays may be."""

    def __init__(self, error=RuntimeError):
        self.error = error

    def __array__(self, *args, **kwargs):
        raise self.error("it cannot be read")


SPOILT = [
    (without("parameters", "linear0.weight"), "no parameters of parameter linear0.weight"),
    (without("first_moment", "linear0.weight"), "no first_moment of parameter linear0.weight"),
    (put("second_moment", "linear0.bias", np.zeros(4)), r"has shape \(19,\), saved is \(4,\)"),
    (
        put("parameters", "linear0.bias", np.zeros(19, complex)),
        "linear0.bias in parameters has type complex128",
    ),
    (put("parameters", "linear0.bias", ["x"] * 19), "linear0.bias in parameters has type <U1"),
    (put("parameters", "linear0.bias", [[1], [1, 2]]), "linear0.bias in parameters is no array"),
    (put("parameters", "linear0.bias", Unreadable()), "linear0.bias in parameters is no array: it"),
    (put("parameters", "linear0.bias", Unreadable(OSError)), "OSError: it cannot be read"),
    (put("parameters", "other.bias", np.zeros(3)), "the model does not have: other.bias"),
    (put(None, "first_moment", None), "no first_moment of parameter"),
    (drop("steps"), "steps is None"),
    (put(None, "steps", -1), "steps is -1, expected an integer >= 0"),
    (put(None, "steps", 1.5), "steps is 1.5"),
    (drop("loss_scale"), r"loss_scale is \(\), expected \(value, good steps\) or None"),
    (put(None, "loss_scale", (0.0, 0)), "value=0.0"),
    (put(None, "loss_scale", (float("nan"), 0)), "value=nan"),
    (put(None, "loss_scale", (1.0, 2, 3)), r"loss_scale is \(1.0, 2, 3\)"),
]


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(("spoil", "told"), SPOILT)
def test_a_failed_load_changes_nothing_on_any_rank(zero, spoil, told):
    """Only rank 1 has a spoilt state; the others neither take theirs nor wait."""

    def rank(comm):
        with engine(comm, zero=zero) as trainer, engine(comm, zero=zero) as other:
            other.step([batches(2, seed=9)[comm.rank]])
            saved = copy.deepcopy(other.state_dict())
            trainer.step([batches(2)[comm.rank]])
            before, scale = flat(trainer.state_dict()), trainer.loss_scale
            if comm.rank == 1:
                spoil(saved)
            with pytest.raises(ArgumentError, match=told) as caught:
                trainer.load_state_dict(saved)
            assert flat(trainer.state_dict()) == before
            assert trainer.loss_scale == scale
            trainer.step([batches(2)[comm.rank]])
            return str(caught.value)

    (text,) = set(run_threads(2, rank))
    assert text.startswith("the saved state was not loaded: rank 1 has ")
    assert "rank 0" not in text


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (put(None, "steps", 7), "rank 0: steps 1; rank 1: steps 7"),
        (put(None, "loss_scale", (4.0, 1)), "rank 1: loss_scale 4.0, 1 good steps"),
        (put("second_moment", "linear0.bias", np.zeros(19)), "second_moment linear0.bias of type"),
    ],
)
def test_ranks_have_different_states(zero, change, told):
    """One of an older file would be in step with the others, with other weights, for good."""

    def rank(comm):
        with engine(comm, zero=zero) as trainer:
            trainer.step([batches(2)[comm.rank]])
            saved = copy.deepcopy(trainer.state_dict())
            trainer.step([batches(2)[comm.rank]])
            before, scale = flat(trainer.state_dict()), trainer.loss_scale
            if comm.rank == 1:
                change(saved)
            with pytest.raises(MismatchError, match=told):
                trainer.load_state_dict(saved)
            assert flat(trainer.state_dict()) == before
            assert trainer.loss_scale == scale
            trainer.step([batches(2)[comm.rank]])

    run_threads(2, rank)


@pytest.mark.parametrize("zero", range(4))
def test_what_was_saved_comes_back(zero):
    """Into fresh engines, also as lists and in float64, as a file format may give it."""

    def rank(comm):
        with engine(comm, zero=zero) as trainer, engine(comm, zero=zero) as other:
            trainer.step([batches(2)[comm.rank]])
            saved = trainer.state_dict()
            wide = {
                name: {k: v.astype(np.float64).tolist() for k, v in group.items()}
                for name, group in saved.items()
                if name not in ("steps", "loss_scale", "hook")
            }
            other.load_state_dict({"steps": np.int64(1), "loss_scale": [8.0, 1], **wide})
            assert flat(other.state_dict()) == flat(saved)

    run_threads(2, rank)


class Picky(Hook):
    """Takes only what it has saved."""

    def __init__(self):
        self._memory = {"x": np.zeros(1)}

    def state(self):
        return dict(self._memory)

    def load(self, state):
        self._memory = {}
        self._memory["x"] = state["x"]


def test_a_hook_that_refuses_keeps_what_it_had():
    def rank(comm):
        hook = Picky()
        with engine(comm, hook=hook) as trainer:
            before = flat(trainer.state_dict())
            saved = copy.deepcopy(trainer.state_dict())
            saved["parameters"]["linear0.bias"] += 1
            saved["hook"] = {"x": np.ones(1)} if comm.rank == 0 else {}
            with pytest.raises(ArgumentError, match="rank 1 has a state that Picky refuses"):
                trainer.load_state_dict(saved)
            assert flat(trainer.state_dict()) == before

    run_threads(2, rank)


@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: PowerSGD(1)])
def test_what_another_rank_has_not_sent_is_refused(make):
    """Of all ranks, though rank 0 gets its own; as text, or as the array that a file gives."""

    def rank(comm):
        with engine(comm, hook=make()) as trainer:
            trainer.step([batches(2)[comm.rank]])
            saved = trainer.state_dict()
            before = flat(saved)
            for of in ("rank 0 of dp=2", np.array("rank 1 of dp=3")):
                text = f'rank 1 has a "hook" that was saved by {of}, where this is rank 1 of dp=2'
                with pytest.raises(ArgumentError, match=text):
                    trainer.load_state_dict({**saved, "hook_of": of})
                assert flat(trainer.state_dict()) == before
            trainer.load_state_dict({**saved, "hook": {}, "hook_of": "rank 0 of dp=3"})
            trainer.load_state_dict({**saved, "hook_of": np.array(saved["hook_of"])})
            assert flat(trainer.state_dict()) == before

    run_threads(2, rank)


@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: PowerSGD(1)])
def test_a_state_without_a_hook_empties_it(make):
    def rank(comm):
        with engine(comm, hook=make()) as trainer:
            first = trainer.state_dict()
            trainer.step([batches(2)[comm.rank]])
            assert trainer.state_dict()["hook"]
            trainer.load_state_dict({**first, "hook": {}})
            return trainer.state_dict()["hook"]

    assert run_threads(2, rank) == [{}, {}]
