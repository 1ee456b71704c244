"""Tensor parallelism in PyTorch: a layer's weights divided between ranks, over pycoll.

torchrun --nproc-per-node 2 examples/torch_tp_dtensor.py [backend]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pycoll.torch

STEPS, WIDTH, LENGTH = 10, 16, 8


class Block(nn.Module):
    """The feed-forward half of a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train() -> list[float]:
    """Return the losses, which are the same on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    # Each rank computes its share of the wide part; the sum over ranks comes from an all-reduce.
    block = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(block.parameters(), lr=2.0)
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step % 2))
        loss = nn.functional.mse_loss(block(x), x.roll(1, -1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    pycoll.torch.make_default("cpu")  # for the mesh, and where no backend is named
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else None)
    losses = train()
    if dist.get_rank() == 0:
        print(f"{dist.get_backend()}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(*map(repr, losses))
    dist.destroy_process_group()
