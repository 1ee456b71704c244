"""Data-parallel training in PyTorch: DistributedDataParallel over pycoll.

torchrun --nproc-per-node 2 examples/torch_ddp.py [backend]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycoll.torch  # noqa: F401 - makes the backend known

STEPS = 20


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's share of the data: points, and the side of a circle on which they lie."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(64, 2, generator=generator)
    return x, (x.square().sum(1) > 1.4).long()


def train() -> list[float]:
    """Return the losses, averaged over ranks."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model = DistributedDataParallel(layers.append(nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged while it runs
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "pycoll")
    losses = train()
    if dist.get_rank() == 0:
        print(f"{dist.get_backend()}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(*map(repr, losses))
    dist.destroy_process_group()
