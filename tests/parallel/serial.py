"""Training in one process, written independently of pycoll: the oracle of the parallel tests."""

import math

import numpy as np


def tree(parts):
    """Add along the in-order balanced tree of docs/architecture.md."""
    power = 1 << (len(parts).bit_length() - 1)
    extra = len(parts) - power
    level = [parts[2 * i] + parts[2 * i + 1] for i in range(extra)] + list(parts[2 * extra :])
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def left(parts):
    """Add from left to right."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


ORDERS = {"tree": tree, "rank": left}


def micro_outermost(order, ranks):
    """Return how stages 2 and 3 nest sums: over ranks first, then over micro-batches."""

    def add(parts):  # parts[r * k + j] is micro-batch j of rank r
        k = len(parts) // ranks
        return ORDERS[order]([ORDERS[order](parts[j::k]) for j in range(k)])

    return add


def first_values(model, dtype=np.float32):
    """Return the parameters of a model at the start, by full name; tied ones once."""
    found = {}
    for name, layer in model.layers:
        for local, spec in layer.parameters().items():
            if spec.tied_to is None:
                value = np.zeros(spec.shape) if spec.init is None else spec.init(spec.shape)
                found[f"{name}.{local}"] = value.astype(dtype)
    return found


def gradients(model, loss, params, sample):
    """Return the loss and the gradient of its sum for one micro-batch."""
    x, kept = sample[0], []
    given = []
    for name, layer in model.layers:
        specs = layer.parameters()
        names = {local: spec.tied_to or f"{name}.{local}" for local, spec in specs.items()}
        given.append((names, {local: params[full] for local, full in names.items()}))
        x, saved = layer.forward(given[-1][1], x)
        kept.append(saved)
    total, count, saved = loss.forward(x, sample[1])
    dy = loss.backward(saved, 1.0)
    found = {}
    for (_, layer), (names, mine), saved in zip(
        reversed(model.layers), reversed(given), reversed(kept), strict=True
    ):
        dx = layer.backward_input(mine, saved, dy)
        for local, g in layer.backward_weight(mine, saved, dy).items():
            full = names[local]
            found[full] = found[full] + g if full in found else g
        dy = dx
    return total, count, {name: found.get(name, np.zeros_like(params[name])) for name in params}


def no_decay(model):
    """Return the full names of parameters without weight decay."""
    return {
        f"{name}.{local}"
        for name, layer in model.layers
        for local, spec in layer.parameters().items()
        if not spec.decay
    }


class AdamW:
    """The formulas of Loshchilov and Hutter, one operation after the other."""

    def __init__(self, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, weight_decay
        self.m, self.v, self.t = {}, {}, 0

    def step(self, params, grads, scale, plain):
        self.t += 1
        b1, b2 = self.betas
        for name, p in params.items():
            f = p.dtype.type
            g = grads[name] * f(scale)
            keep = 1.0 if name in plain else 1 - self.lr * self.decay
            m = self.m.get(name, np.zeros_like(p)) * f(b1) + g * f(1 - b1)
            v = self.v.get(name, np.zeros_like(p)) * f(b2) + (g * g) * f(1 - b2)
            self.m[name], self.v[name] = m, v
            root, rate = f(1 / math.sqrt(1 - b2**self.t)), f(self.lr / (1 - b1**self.t))
            params[name] = p * f(keep) - rate * (m / (np.sqrt(v) * root + f(self.eps)))


class SGD:
    def __init__(self, lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.0):
        self.lr, self.momentum, self.nesterov, self.decay = lr, momentum, nesterov, weight_decay
        self.b = {}

    def step(self, params, grads, scale, plain):
        for name, p in params.items():
            f = p.dtype.type
            g = grads[name] * f(scale) + p * f(0 if name in plain else self.decay)
            self.b[name] = self.b.get(name, np.zeros_like(p)) * f(self.momentum) + g
            look = g + self.b[name] * f(self.momentum) if self.nesterov else self.b[name]
            params[name] = p - f(self.lr) * look


def train(model, loss, steps, optimizer, add, clip=None, dtype=np.float32):
    """Train; return parameters, and loss and gradient norm of each step.

    Args:
        model: Layers.
        loss: Loss.
        steps: The micro-batches of each step, those of all ranks in rank order.
        optimizer: One of the above.
        add: How to add one array per micro-batch.
        clip: Largest norm of the mean gradient.
        dtype: Type of the parameters.
    """
    params, plain, log = first_values(model, dtype), no_decay(model), []
    for samples in steps:
        parts = [gradients(model, loss, params, sample) for sample in samples]
        count = sum(part[1] for part in parts)
        total = {name: add([part[2][name] for part in parts]) for name in params}
        wide = np.concatenate([g.ravel() for g in total.values()]).astype(np.float64)
        norm = math.sqrt(math.fsum(wide * wide)) / count
        scale = 1 / count
        if clip is not None and norm > clip:
            scale *= clip / norm
        optimizer.step(params, total, scale, plain)
        log.append((add([np.float64(part[0]) for part in parts]) / count, norm))
    return params, log
