"""Fully sharded training in PyTorch: FSDP2 over pycoll.

Every rank keeps a part of every parameter; weights are gathered before use, gradients are reduced
and scattered. torchrun --nproc-per-node 2 examples/torch_fsdp2.py [backend]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import pycoll.torch  # noqa: F401 - makes the backend known

STEPS, WIDTH, LENGTH, WORDS = 10, 32, 12, 20


class Model(nn.Module):
    """A small transformer that predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        return self.out(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's share of the data: sequences that count up from a random word."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    start = torch.randint(WORDS, (8, 1), generator=generator)
    words = (start + torch.arange(LENGTH + 1)) % WORDS
    return words[:, :-1], words[:, 1:]


def train() -> list[float]:
    """Return the losses, averaged over ranks."""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
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
