"""Small models and data that are the same on every backend."""

import torch
from torch import nn

STEPS = 4


def mlp(width=32, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = [nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 4)).to(dtype)


def batch(rank, step, rows=8, seed=1):
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    x = torch.randn(rows, 16, generator=generator)
    return x, torch.randn(rows, 4, generator=generator)


def train(model, rank, optimizer=None, steps=STEPS, backward=None, loss_of=None):
    """Train on a rank's own batches and return the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = loss_of(model, x, y) if loss_of else nn.functional.mse_loss(model(x), y)
        loss.backward()
        if backward:
            backward(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


class Detour(nn.Module):
    """A model of which every rank leaves another part unused."""

    def __init__(self):
        super().__init__()
        self.common = mlp()
        self.sides = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x, side=0):
        return self.sides[side](self.common(x))
