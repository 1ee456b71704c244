"""Operations of mpi4py, by what they are and not as functions of two arrays."""

import sys
from types import ModuleType

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.testing import run_threads

NAMES = {"SUM": "sum", "PROD": "prod", "MIN": "min", "MAX": "max", "BAND": "and", "BOR": "or"}


class Op:
    """As mpi4py's: it can be called, with Python's operators on whole arrays."""

    def __init__(self, name, predefined=True):
        self.name, self.is_predefined = name, predefined

    def __call__(self, a, b):
        if self.is_predefined:
            raise ValueError("the truth value of an array is ambiguous")
        return a + 2 * b

    def __eq__(self, other):
        return isinstance(other, Op) and self.name == other.name

    __hash__ = None


@pytest.fixture
def mpi(monkeypatch):
    """Return what stands for the module mpi4py.MPI where there is none."""
    module = ModuleType("mpi4py.MPI")
    module.Op = Op
    for name in (*NAMES, "BXOR", "MAXLOC"):
        setattr(module, name, Op(name))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_an_operation(mpi, name):
    def rank(comm):
        x = np.arange(6) + comm.rank
        op = getattr(mpi, name)
        for _ in range(2):
            assert np.array_equal(comm.all_reduce(x, op), comm.all_reduce(x, NAMES[name]))
            assert np.array_equal(comm.reduce(x, op), comm.reduce(x, NAMES[name]))
        counts = [4, 2]
        got, want = (comm.reduce_scatter_v(x, counts, o) for o in (op, NAMES[name]))
        return np.array_equal(got, want)

    assert run_threads(2, rank) == [True] * 2


def test_others(mpi):
    def rank(comm):
        with pytest.raises(ArgumentError, match=r"MINLOC and MAXLOC are comm.minloc"):
            comm.all_reduce(np.ones(3), mpi.MAXLOC)
        got = comm.all_reduce(np.full(3, 1.0 + comm.rank), Op("own", predefined=False))
        return got.tolist() == [5.0] * 3  # a function of the user's is called

    assert run_threads(2, rank) == [True] * 2
