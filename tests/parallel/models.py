"""A small classifier for tests, with gradients written by hand, and data for it."""

import numpy as np

from pycoll.parallel import ParameterSpec, Sequential


def values(seed, std=0.2, dtype="float64"):
    """Return an initialiser that gives the same values wherever it is called."""
    return lambda shape: (np.random.default_rng(seed).standard_normal(shape) * std).astype(dtype)


class Linear:
    """``y = x @ weight + bias``."""

    def __init__(self, inputs, outputs, seed, tied_to=None, extra=False):
        self.shape, self.seed, self.tied_to, self.extra = (inputs, outputs), seed, tied_to, extra

    def parameters(self):
        specs = {
            "weight": ParameterSpec(self.shape, init=values(self.seed), tied_to=self.tied_to),
            "bias": ParameterSpec(self.shape[1:], decay=False),
        }
        if self.extra:
            specs["unused"] = ParameterSpec((3,), init=values(self.seed + 99))
        return specs

    def forward(self, params, x):
        return x @ params["weight"] + params["bias"], x

    def backward_input(self, params, saved, dy):
        return dy @ params["weight"].T

    def backward_weight(self, params, saved, dy):
        return {"weight": saved.T @ dy, "bias": dy.sum(axis=0)}


class Relu:
    def parameters(self):
        return {}

    def forward(self, params, x):
        return np.maximum(x, 0), x > 0

    def backward_input(self, params, saved, dy):
        return dy * saved

    def backward_weight(self, params, saved, dy):
        return {}


class CrossEntropy:
    """Sum over samples of ``-log softmax(logits)[target]``."""

    def forward(self, logits, targets):
        shifted = logits - logits.max(axis=1, keepdims=True)
        odds = np.exp(shifted)
        odds /= odds.sum(axis=1, keepdims=True)
        rows = np.arange(len(targets))
        with np.errstate(divide="ignore"):
            loss = -np.log(odds[rows, targets].astype(np.float64)).sum()
        return loss, len(targets), (odds, targets)

    def backward(self, saved, scale):
        odds, targets = saved
        delta = odds.copy()
        delta[np.arange(len(targets)), targets] -= 1
        return delta * delta.dtype.type(scale)


SIZES = (7, 19, 11, 5)


def mlp(sizes=SIZES, tied=False, extra=False):
    """Return a multilayer perceptron; with `tied`, layers of equal shape share one weight."""
    layers, seen = [], {}
    for i in range(len(sizes) - 1):
        shape = sizes[i : i + 2]
        owner = seen.setdefault(shape, f"linear{i}.weight") if tied else None
        tied_to = None if owner == f"linear{i}.weight" else owner
        layers.append((f"linear{i}", Linear(*shape, seed=i, tied_to=tied_to, extra=extra)))
        layers.append((f"relu{i}", Relu()))
    return Sequential(layers[:-1])


def batches(count, size=6, sizes=SIZES, seed=5, dtype="float32"):
    """Return micro-batches ``(inputs, targets)``."""
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal((size, sizes[0])).astype(dtype), rng.integers(0, sizes[-1], size))
        for _ in range(count)
    ]
