"""Hugging Face Accelerate over pycoll: it takes the process group that is already there.

torchrun --nproc-per-node 2 examples/torch_accelerate.py [backend]
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

import pycoll.torch  # noqa: F401 - makes the backend known


def train() -> list[float]:
    """Return the losses, averaged over ranks."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(64, 2)
    data = torch.utils.data.TensorDataset(x, x.prod(1, keepdim=True))
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(5):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "pycoll")  # before Accelerator()
    losses = train()
    if dist.get_rank() == 0:
        print(f"{dist.get_backend()}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(*map(repr, losses))
    dist.destroy_process_group()
