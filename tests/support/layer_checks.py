"""What tests of layers share: finite differences, comparisons, and layers run on given numbers."""

import numpy as np

from pycoll.parallel.nn import initial


def perturbed(layer, rng, dtype=np.float64):
    """Return parameters of a layer that are not what they start with, so that none is special."""
    return {
        name: (value + 0.3 * rng.standard_normal(value.shape)).astype(dtype)
        for name, value in initial(layer).items()
    }


def run_layer(layer, params, x, dy):
    """Return the output, the gradient of the input, and those of the parameters by name."""
    y, saved = layer.forward(params, x)
    dx = layer.backward_input(params, saved, dy)
    return y, dx, layer.backward_weight(params, saved, dy)


def numeric_gradient(function, x, step=1e-6):
    """Return the gradient of a scalar function at each element by central differences."""
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        kept = x[index]
        x[index] = kept + step
        above = function()
        x[index] = kept - step
        below = function()
        x[index] = kept
        gradient[index] = (above - below) / (2 * step)
    return gradient


def distance(got, want):
    """Return the norm of the difference, relative to the norm of what is wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{got.shape} instead of {want.shape}"
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-300))


def check_gradients(layer, params, x, rng, tolerance=1e-8):
    """Compare all gradients of a layer with finite differences of its forward pass, in float64."""
    dy = rng.standard_normal(layer.forward(params, x)[0].shape)
    _, dx, gradients = run_layer(layer, params, x, dy)

    def scalar():
        return float(np.sum(layer.forward(params, x)[0] * dy))

    assert set(gradients) == set(params)
    pairs = [(gradients[name], params[name], name) for name in params]
    pairs += [(dx, x, "input")] if np.issubdtype(np.asarray(x).dtype, np.floating) else []
    for got, value, name in pairs:
        assert distance(got, numeric_gradient(scalar, value)) < tolerance, name
    return pairs


class Recorder:
    """A communicator that lists its calls: ``(collective, bytes of the whole vector)``."""

    def __init__(self, comm):
        self._comm, self.calls = comm, []
        self.rank, self.world_size = comm.rank, comm.world_size

    def all_reduce(self, x, op="sum"):
        self.calls.append(("all_reduce", x.nbytes))
        return self._comm.all_reduce(x, op)

    def reduce_scatter(self, x):
        self.calls.append(("reduce_scatter", x.nbytes))
        return self._comm.reduce_scatter(x)

    def all_gather(self, x):
        self.calls.append(("all_gather", x.nbytes * self.world_size))
        return self._comm.all_gather(x)


def part(whole, axis, comm):
    """Return this rank's part of an array, or all of it for ``axis=None``."""
    return whole if axis is None else np.split(whole, comm.world_size, axis)[comm.rank].copy()


def parts(params, specs, comm):
    """Return this rank's parts of whole parameters."""
    return {name: part(params[name], spec.tensor_axis, comm) for name, spec in specs.items()}


def saved_bytes(saved):
    """Return the bytes of all arrays that a layer has saved; memory that is shared counts once."""
    owners = {}

    def visit(thing):
        if isinstance(thing, np.ndarray):
            while isinstance(thing.base, np.ndarray):
                thing = thing.base
            owners[id(thing)] = thing
        elif isinstance(thing, dict):
            visit(list(thing.values()))
        elif isinstance(thing, list | tuple):
            for item in thing:
                visit(item)

    visit(saved)
    return sum(array.nbytes for array in owners.values())
