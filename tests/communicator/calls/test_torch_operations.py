"""Operations of torch.distributed in calls of a communicator."""

import sys
from types import ModuleType

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.testing import run_threads

NAMES = {
    **{"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "AVG": "avg"},
    **{"BAND": "and", "BOR": "or", "BXOR": "xor"},
}


class ReduceOp:
    """As PyTorch's: an object that can be called, with something else than arrays."""

    def __init__(self, name):
        self.name = name

    def __call__(self, factor):
        raise AssertionError("it does not combine two arrays")

    def __eq__(self, other):
        return isinstance(other, ReduceOp) and self.name == other.name

    __hash__ = None


@pytest.fixture
def reduce_op(monkeypatch):
    """Return what stands for torch.distributed.ReduceOp, with or without PyTorch."""
    module, made = ModuleType("torch.distributed"), type("Made", (ReduceOp,), {})
    for name in (*NAMES, "PREMUL_SUM"):
        setattr(made, name, made(name))
    module.ReduceOp = made
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_an_operation(reduce_op, name):
    def rank(comm):
        x, op = np.arange(6) + comm.rank, getattr(reduce_op, name)
        for _ in range(2):
            assert np.array_equal(comm.all_reduce(x, op), comm.all_reduce(x, NAMES[name]))
            planned = comm.plan("all_reduce", x, op)(x)
            assert np.array_equal(planned, comm.all_reduce(x, NAMES[name]))
        got, want = (comm.reduce_scatter_v(x, [4, 2], o) for o in (op, NAMES[name]))
        return np.array_equal(got, want)

    assert run_threads(2, rank) == [True] * 2


def test_one_that_is_not_here(reduce_op):
    def rank(comm):
        with pytest.raises(ArgumentError, match=r"op is PyTorch's; of those SUM, PRODUCT, MIN"):
            comm.all_reduce(np.ones(3), reduce_op.PREMUL_SUM)
        return comm.all_reduce(np.ones(3))[0]

    assert run_threads(2, rank) == [2.0] * 2


def test_a_module_without_operations_is_no_harm(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("torch.distributed"))
    assert run_threads(2, lambda comm: comm.all_reduce(np.ones(3), np.maximum)[0]) == [1.0] * 2
