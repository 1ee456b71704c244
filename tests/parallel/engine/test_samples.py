"""What is no batch, and numbers of micro-batches that do not fit, are errors on every rank."""

import re

import numpy as np
import pytest

from parallel.engine.test_checks import engine, refused
from parallel.engine.test_data_parallel import digest
from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import MismatchError
from pycoll.parallel import DataParallel, Mesh
from pycoll.testing import run_threads

X, T = batches(1)[0]

BAD = {
    "a generator in place of micro-batches": lambda: (pair for pair in [(X, T)]),
    "a NoneType in place of micro-batches": lambda: None,
    "an int in place of micro-batches": lambda: 3,
    "a dict in place of micro-batches": lambda: {0: (X, T)},
    "an ndarray as micro-batch 0 of 2": lambda: (X, T),
    "a NoneType as micro-batch 1 of 2": lambda: [(X, T), None],
    "a float as micro-batch 0 of 1": lambda: [1.5],
    "only 0 of two parts in micro-batch 0": lambda: [[]],
    "only 1 of two parts in micro-batch 1": lambda: [(X, T), (X,)],
}


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize("zero", [0, 3])
def test_what_is_no_batch_is_refused_by_every_rank(text, zero):
    def rank(comm):
        trainer = engine(comm, zero=zero)
        before = digest(trainer.gather())
        try:
            trainer.step(BAD[text]() if comm.rank == 1 else [(X, T)])
        finally:
            assert digest(trainer.gather()) == before
            assert not trainer.step([(X, T)]).skipped  # goes on

    for told in refused(3, rank):
        assert f"the step was not taken: rank 1 has {text}; expected a sequence of" in told


class Lazy:
    """Micro-batches that are made when they are taken."""

    taken = 0

    def __len__(self):
        return 2

    def __getitem__(self, j):
        assert j == self.taken
        self.taken += 1
        return X, T


def test_micro_batches_are_taken_when_their_turn_comes():
    def rank(comm):
        mine = Lazy()
        engine(comm).step(mine)
        return mine.taken

    assert run_threads(2, rank) == [2, 2]


@pytest.mark.parametrize(("wrong", "told"), [(None, "a NoneType"), ((X,), "only 1 of two parts")])
def test_a_lazy_micro_batch_that_is_none(wrong, told):
    """It is not left out without a word."""

    class Empty(Lazy):
        def __getitem__(self, j):
            return super().__getitem__(j) if j == 0 else wrong

    def rank(comm):
        trainer = engine(comm)
        before = digest(trainer.gather())
        try:
            trainer.step(Empty() if comm.rank == 1 else Lazy())
        finally:
            assert digest(trainer.gather()) == before
            assert not trainer.step([(X, T)]).skipped

    for text in refused(3, rank):
        assert re.search(f"rank 1 has {told} .*micro-batch 1.*, expected .inputs, targets.", text)


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"replica": 2, "tp": 2}])
def test_ranks_of_one_tp_group_with_different_numbers_of_micro_batches(axes):
    def rank(comm):
        mesh = Mesh(comm, **axes)
        trainer = DataParallel(mlp(), CrossEntropy(), mesh)
        try:
            trainer.step([(X, T)] * (2 if comm.rank == 1 else 1))
        finally:  # groups with different numbers are fine
            assert not trainer.step([(X, T)] * (1 + trainer.groups.data.rank)).skipped

    for told in refused(4, rank, kind=MismatchError):
        assert "of one tp group" in told
        assert "different numbers of micro-batches: ranks 0, 2, 3: 1; rank 1: 2" in told


def test_the_number_is_that_of_the_rank_with_most():
    def rank(comm):
        return engine(comm).step([(X, T)] * comm.rank).samples

    assert run_threads(3, rank) == [3 * len(np.asarray(T))] * 3
