"""A module, groups and a training loop for the tests of `ZeroOptimizer`."""

import copy

import numpy as np
import torch

from pycoll.torch.zero_optimizer import ZeroOptimizer

N, STEPS = 2, 6
SETTINGS = {"lr": 0.01, "weight_decay": 0.1}
torch.manual_seed(0)
PROTOTYPE = torch.nn.Sequential(
    torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.LayerNorm(13), torch.nn.Linear(13, 5)
).double()
PROTOTYPE.register_parameter("gain", torch.nn.Parameter(torch.tensor(1.5).double()))


def make():
    return copy.deepcopy(PROTOTYPE)


def loss(net, step, rank):
    rng = np.random.default_rng([step, rank])
    x, t = torch.tensor(rng.standard_normal((4, 7))), torch.tensor(rng.integers(0, 5, 4))
    return torch.nn.functional.cross_entropy(net(x) * net.gain, t)


def two_groups(net):
    decayed = [p for p in net.parameters() if p.ndim > 1]
    return [
        {"params": decayed},
        {"params": [p for p in net.parameters() if p.ndim < 2], "weight_decay": 0, "lr": 0.02},
    ]


def one_group(net):
    return [{"params": list(net.parameters())}]


def divided(net, comm, groups=two_groups, kind=torch.optim.AdamW, **changes):
    settings = {**SETTINGS, "bucket_bytes": 500, **changes}
    return ZeroOptimizer(kind, net, comm, groups=groups(net), **settings)


def train(net, optimizer, first, last, ranks, scheduler=None):
    """Take steps with the mean over some ranks, of which `optimizer` adds others."""
    for step in range(first, last):
        optimizer.zero_grad()
        (sum(loss(net, step, rank) for rank in ranks) / len(ranks)).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()


def values(net):
    return [p.detach().numpy().copy() for p in net.parameters()]


def check(found, expected):
    for value, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-9, atol=1e-12)
