"""Types of results: what `make lint` has mypy check is true when it runs."""

import inspect
import sys
import typing
from types import SimpleNamespace

import numpy as np
import pytest

import typed_program
from pycoll import Communicator, Work
from pycoll.comm import signatures
from pycoll.testing import run_threads


@pytest.mark.parametrize("n", [1, 3])
def test_the_program_runs(n):
    run_threads(n, typed_program.main)


def test_results_are_of_the_types_that_are_promised():
    def rank(comm):
        x = np.ones(2, np.float32)
        kinds = [type(comm.all_reduce(x)), type(comm.all_reduce(x, async_op=True))]
        return [*kinds, comm.all_reduce(x).dtype, comm.scan(x, out=x) is x]

    for found in run_threads(2, rank):
        assert found == [np.ndarray, Work, np.dtype(np.float32), True]


TYPED = {
    "all_reduce": "_Reducing",
    "reduce_scatter": "_Reducing",
    "scan": "_Reducing",
    "exscan": "_Reducing",
    "reduce": "_ReducingToRoot",
    "all_gather": "_Moving",
    "all_to_all": "_Moving",
    "gather": "_Gathering",
    "broadcast": "_Broadcasting",
    "scatter": "_Scattering",
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 forgets overloads")
@pytest.mark.parametrize("name", TYPED)
def test_overloads_have_the_parameters_of_the_method(name):
    own = inspect.signature(getattr(Communicator, name).__wrapped__).parameters
    options = {"algorithm", "timeout", "stream", "async_op", "options", "order"}
    where = {"__module__": signatures.__name__, "__qualname__": f"{TYPED[name]}.__call__"}
    overloads = typing.get_overloads(SimpleNamespace(**where))
    assert len(overloads) == 4
    for overload in overloads:
        typed = inspect.signature(overload).parameters
        assert set(typed) - options == set(own) - options
        order = [p for p in own if own[p].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert list(typed)[: len(order)] == order
        for p in set(own) - options - {"x", "out"}:
            assert (typed[p].default, typed[p].kind) == (own[p].default, own[p].kind)
