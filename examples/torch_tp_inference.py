"""Tensor parallel inference: the logits of a request do not depend on what else is in the batch.

torchrun --nproc-per-node 4 examples/torch_tp_inference.py [backend [ways]]

A small transformer is divided between the ranks: each has some of the heads, and some of the width
of the feed-forward layers, and `dist.all_reduce` adds up what they find. A server puts the tokens
of several requests into one call, in another way each time. Here 50 random ways are compared, bit
by bit, with one token in each call.

What a rank computes alone is kept out of it: every token goes through the layers by itself, from
memory that begins at a multiple of 64 bytes, so matrix libraries cannot choose by the size of the
batch. That is slow; servers have kernels with fixed tiles for it. So only the all_reduce is at
stake. With two ranks every library passes, because a + b = b + a; with more it has to add in an
order that does not depend on the size of the call.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

import pycoll.torch  # noqa: F401 - registers the backend

VOCAB, WIDTH, HEADS, LAYERS, LONGEST = 96, 64, 4, 2, 24
HEAD = WIDTH // HEADS
PROMPTS, WAYS = 6, 50


class Request:
    """One sequence of tokens, and the keys and values of those that were read."""

    def __init__(self, tokens: Tensor, heads: int) -> None:
        self.tokens, self.read = tokens, 0
        self.keys, self.values = torch.zeros(2, LAYERS, LONGEST, heads, HEAD)


Batch = list[tuple[Request, int]]  # of some requests, how many of the next tokens to read


class Model:
    """This rank's share of a transformer with random weights."""

    def __init__(self, rank: int, n: int) -> None:
        made = torch.Generator().manual_seed(0)

        def matrix(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=made) / shape[-1] ** 0.5

        def share(weights: Tensor, dim: int) -> Tensor:
            return weights.chunk(n, dim)[rank].clone()

        self.heads = HEADS // n
        self.tokens, self.places = matrix(VOCAB, WIDTH), matrix(LONGEST, WIDTH)
        self.layers = [
            {
                **{name: share(matrix(WIDTH, WIDTH), 0) for name in ("query", "key", "value")},
                "out": share(matrix(WIDTH, WIDTH), 1),
                "up": share(matrix(4 * WIDTH, WIDTH), 0),
                "down": share(matrix(WIDTH, 4 * WIDTH), 1),
            }
            for _ in range(LAYERS)
        ]

    def attend(self, i: int, row: Tensor, request: Request, place: int) -> Tensor:
        """Return this rank's part of what attention adds to one token."""
        layer, x = self.layers[i], layer_norm(row, (WIDTH,))
        query, key, value = ((layer[k] @ x).view(-1, HEAD) for k in ("query", "key", "value"))
        keys, values = request.keys[i], request.values[i]
        keys[place], values[place] = key, value
        scores = (keys[: place + 1] * query).sum(-1) / HEAD**0.5
        mixed = (scores.softmax(0).unsqueeze(-1) * values[: place + 1]).sum(0)
        return layer["out"] @ mixed.view(-1)

    def feed_forward(self, i: int, row: Tensor) -> Tensor:
        layer = self.layers[i]
        return layer["down"] @ gelu(layer["up"] @ layer_norm(row, (WIDTH,)))

    def logits(self, batch: Batch) -> Tensor:
        """Read the tokens in one call; return the logits after each, ``[tokens, VOCAB]``."""
        routes = [(r, place) for r, k in batch for place in range(r.read, r.read + k)]
        x = torch.stack([self.tokens[r.tokens[p]] + self.places[p] for r, p in routes])
        for i in range(LAYERS):
            parts = [self.attend(i, row.clone(), *to) for row, to in zip(x, routes, strict=True)]
            x = x + self.summed(parts)
            x = x + self.summed([self.feed_forward(i, row.clone()) for row in x])
        for request, k in batch:
            request.read += k
        return torch.stack([self.tokens @ layer_norm(row.clone(), (WIDTH,)) for row in x])

    @staticmethod
    def summed(parts: list[Tensor]) -> Tensor:
        """Add up the parts of all ranks, for all tokens of the call at once."""
        whole = torch.stack(parts)
        dist.all_reduce(whole)
        return whole


def read_all(
    model: Model, prompts: list[Tensor], batches: Callable[[list[Request]], Batch]
) -> Tensor:
    """Read prompts as `batches` yields it from the requests that are left; return all logits."""
    requests = [Request(tokens, model.heads) for tokens in prompts]
    found: dict[Request, list[Tensor]] = {request: [] for request in requests}
    while left := [r for r in requests if r.read < len(r.tokens)]:
        batch = batches(left)
        logits = model.logits(batch).split([k for _, k in batch])
        for (request, _), rows in zip(batch, logits, strict=True):
            found[request].append(rows)
    return torch.cat([torch.cat(rows) for rows in found.values()])


def random_batches(seed: int) -> Callable[[list[Request]], Batch]:
    """Return a way to batch: some requests, each with some tokens of its prompt."""
    made = torch.Generator().manual_seed(seed)

    def upto(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=made))

    def batches(left: list[Request]) -> Batch:
        chosen = torch.randperm(len(left), generator=made)[: upto(len(left))]
        return [(left[i], upto(len(left[i].tokens) - left[i].read)) for i in chosen]

    return batches


def main(count: int) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    model, made = Model(rank, n), torch.Generator().manual_seed(1)
    lengths = torch.randint(5, LONGEST + 1, (PROMPTS,), generator=made)
    prompts = [torch.randint(0, VOCAB, (int(k),), generator=made) for k in lengths]
    alone = read_all(model, prompts, lambda left: [(left[0], 1)])
    ways = [read_all(model, prompts, random_batches(seed)) for seed in range(count)]
    differ = sum(int((way != alone).sum()) for way in ways)
    furthest = max(float((way - alone).abs().max()) for way in ways)
    if rank == 0:
        print(
            f"{dist.get_backend()}, {n} ranks: {differ} of {count * alone.numel()} logits "
            f"depend on the batch; the furthest is off by {furthest:.2g}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "pycoll")
    main(int(sys.argv[2]) if len(sys.argv) > 2 else WAYS)
    dist.destroy_process_group()
