"""Pipeline parallelism in PyTorch: every rank has some of the layers, over pycoll.

torchrun --nproc-per-node 2 examples/torch_pipeline.py [backend]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pycoll.torch  # noqa: F401 - makes the backend known

STEPS, WIDTH, MICROBATCHES = 10, 32, 4


def layers(rank: int) -> nn.Module:
    """The layers of a rank; the first one widens the input, the last one gives the answer."""
    torch.manual_seed(rank)
    first, last = rank == 0, rank == dist.get_world_size() - 1
    return nn.Sequential(
        nn.Linear(2 if first else WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1 if last else WIDTH)
    )


def train() -> list[float]:
    """Return the losses of each step, on the last rank; nothing on the others."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model = layers(rank)
    stage = PipelineStage(model, rank, n, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if rank == n - 1:
            parts: list[torch.Tensor] = []
            inputs = (x,) if n == 1 else ()
            schedule.step(*inputs, target=x.prod(1, keepdim=True), losses=parts)
            losses.append(torch.stack(parts).mean().item())
        elif rank == 0:
            schedule.step(x)
        else:
            schedule.step()
        optimizer.step()
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "pycoll")
    losses = train()
    if losses:
        print(f"{dist.get_backend()}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(*map(repr, losses))
    dist.destroy_process_group()
