"""What one stage alone notices is an error on the ranks of all stages, which have the same text."""

import numpy as np
import pytest

from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel import Mesh, Pipeline
from pycoll.parallel.nn import CrossEntropy, Linear, ReLU, Sequential
from pycoll.parallel.random import Key
from pycoll.testing import run_threads


def model(first=0):
    layers = [("in", Linear(8, 8, Key(first).fold("in"))), ("relu", ReLU())]
    return Sequential([*layers, ("out", Linear(8, 8, Key(0).fold("out")))])


def pipe(mesh, chain, schedule="1f1b"):
    return Pipeline(chain, CrossEntropy(), mesh, schedule, micro_batches=2, cut=["out"], zero=1)


def test_first_values_of_one_stage_differ():
    def rank(comm):
        with Mesh(comm, dp=2, pp=2) as mesh:
            with pytest.raises(MismatchError, match=r"parameter in\.weight differs") as caught:
                pipe(mesh, model(first=int(comm.rank == 2)))
            return str(caught.value), comm.all_reduce(np.ones(1))[0]

    assert len(set(run_threads(4, rank))) == 1


def test_saved_states_of_one_stage_differ():
    def rank(comm):
        with Mesh(comm, dp=2, pp=2) as mesh, pipe(mesh, model()) as engine:
            before, saved = engine.gather(), engine.state_dict()
            saved["parameters"] = {name: value + 1 for name, value in saved["parameters"].items()}
            saved["parameters"]["in.weight"] += comm.rank == 2
            with pytest.raises(MismatchError, match=r"rank 0: .*; rank 2: ") as caught:
                engine.load_state_dict(saved)
            for name, value in engine.gather().items():
                np.testing.assert_array_equal(value, before[name])
            return str(caught.value)

    assert len(set(run_threads(4, rank))) == 1


def test_a_stage_that_steps_alone_calls_ranks_by_their_numbers_in_the_mesh():
    def rank(comm):
        x, y = np.ones((4, 8), "f4"), np.arange(4)
        x[0, 0] = np.nan if comm.rank == 2 else 1  # the first stage, with the second part of dp
        with Mesh(comm, dp=2, pp=2) as mesh:
            engine = pipe(mesh, model(), "2bw")
            with pytest.raises(Exception, match="rank 2") as caught:
                [engine.step([(x, y)] * 2) for _ in range(3)]
            return caught.value

    first = run_threads(4, rank)[0]
    assert isinstance(first, ArgumentError)
    assert "rank 2 has gradients that are not finite" in str(first)
