"""Arrays of JAX in collectives, as docs/coming-from.md says; skipped where there is no JAX."""

import os

import numpy as np
import pytest

import pycoll
from pycoll.testing import run_threads

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="it needs JAX")
jnp = jax.numpy


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_arrays_of_jax_in_every_type(dtype):
    def work(comm):
        x = jnp.arange(4).astype(dtype)
        total, parts = comm.all_reduce(x), comm.all_gather(x)
        assert total.dtype == parts.dtype == x.dtype
        return jnp.asarray(total).astype(float).tolist(), len(parts), x.astype(float).tolist()

    for found in run_threads(2, work):
        assert found == ([0, 2, 4, 6], 8, [0, 1, 2, 3])


@pytest.mark.parametrize("call", ["all_reduce", "broadcast"])
def test_they_are_never_written_to(call):
    def work(comm):
        x = jnp.full(3, 1.0 + comm.rank)
        try:
            comm.all_reduce(x, out=x) if call == "all_reduce" else comm.broadcast(x, 0)
        except pycoll.CollError as error:
            return str(error), x.tolist()

    (_, first), (said, second) = run_threads(2, work)
    assert "read-only" in said
    assert (first, second) == ([1, 1, 1], [2, 2, 2])


def test_inside_jit():
    def work(comm):
        x = jnp.full(3, 2.0)
        with pytest.raises(pycoll.ArgumentError, match=r"inside jax\.jit, call pycoll by jax\.exp"):
            jax.jit(comm.all_reduce)(x)
        call = jax.experimental.io_callback
        return jax.jit(lambda v: call(comm.all_reduce, v, v, ordered=True) * 2)(x).tolist()

    assert run_threads(1, work) == [[4.0, 4.0, 4.0]]


def test_gradients_of_a_tree():
    def work(comm):
        def loss(w, x):
            return (w["a"] * x).sum() + w["b"]

        weights = {"a": jnp.ones(2), "b": jnp.zeros(())}
        gradients = jax.grad(loss)(weights, jnp.full(2, 1.0 + comm.rank))
        mean = jax.tree.map(lambda g: comm.all_reduce(g, "avg"), gradients)
        return {name: np.asarray(value).tolist() for name, value in mean.items()}

    assert run_threads(2, work) == [{"a": [1.5, 1.5], "b": 1.0}] * 2
