"""Train a digit classifier data-parallel, to the same bits on 1, 2 or 4 ranks.

    pycoll run -n 4 examples/digits.py        python examples/digits.py

Every step has four micro-batches, and rank r of n takes the next 4 / n of them. Gradients are added
along the in-order tree, on each rank and then over the ranks; trees nest, so it is always the same
tree ((0 + 1) + (2 + 3)), whoever computes its leaves.
"""

import argparse
import hashlib
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from threadpoolctl import threadpool_limits

import pycoll

MICRO_BATCHES, MICRO_SIZE = 4, 64
SIZES = (64, 48, 10)
TRAIN = 1437  # of 1797 images; the others are for the test
LEARNING_RATE, MOMENTUM = 0.15, 0.9


def views(flat: np.ndarray) -> list[np.ndarray]:
    """Return w1, b1, w2, b2 as views of one vector."""
    shapes = [s for a, b in pairwise(SIZES) for s in ((a, b), (b,))]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    return [part.reshape(s) for part, s in zip(np.split(flat, ends)[:-1], shapes, strict=True)]


def forward(params: list[np.ndarray], images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden layer and the probabilities of the classes."""
    w1, b1, w2, b2 = params
    hidden = np.maximum(images @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, odds / odds.sum(axis=1, keepdims=True)


def gradient(flat: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the gradient of the summed cross-entropy as one vector, and the loss as its last."""
    params = views(flat)
    hidden, odds = forward(params, images)
    loss = -np.log(odds[np.arange(len(labels)), labels]).sum()
    odds[np.arange(len(labels)), labels] -= 1
    back = (odds @ params[2].T) * (hidden > 0)
    parts = (images.T @ back, back.sum(axis=0), hidden.T @ odds, odds.sum(axis=0), loss)
    return np.concatenate([np.ravel(part) for part in parts]).astype(np.float32)


def tree_sum(parts: list[np.ndarray]) -> np.ndarray:
    """Add arrays along the in-order tree: neighbours first. Their number is a power of two."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def load(comm: pycoll.Communicator) -> tuple[np.ndarray, ...]:
    """Read the images on rank 0 and hand them to all; one row is 64 pixels and the label."""
    table = np.empty((1797, 65), np.float32)
    if comm.rank == 0:
        from sklearn.datasets import load_digits

        digits = load_digits()
        table[:, :64], table[:, 64] = digits.data / 16, digits.target
        np.random.default_rng(0).shuffle(table)
    comm.broadcast(table)
    images, labels = table[:, :64].copy(), table[:, 64].astype(int)
    return images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:]


def train(
    comm: pycoll.Communicator,
    epochs: int,
    order: str,
    show: Callable[[int, float, float, float], None],
) -> tuple[np.ndarray, float]:
    """Return parameters and accuracy; rank 0 calls ``show(epoch, loss, accuracy, seconds)``."""
    images, labels, test_images, test_labels = load(comm)
    rng = np.random.default_rng(1)  # the same on every rank
    count = sum((a + 1) * b for a, b in pairwise(SIZES))
    flat = (rng.standard_normal(count) * 0.1).astype(np.float32)
    speed, accuracy = np.zeros_like(flat), 0.0
    total = comm.empty(count + 1)  # gradient and loss, in symmetric memory
    own = np.split(np.arange(MICRO_BATCHES), comm.world_size)[comm.rank]
    step_size = MICRO_BATCHES * MICRO_SIZE
    for epoch in range(epochs):
        start, loss = time.perf_counter(), 0.0
        steps = rng.permutation(TRAIN)[: TRAIN // step_size * step_size].reshape(-1, step_size)
        for batch in steps:
            micro = batch.reshape(MICRO_BATCHES, MICRO_SIZE)[own]
            total[:] = tree_sum([gradient(flat, images[m], labels[m]) for m in micro])
            comm.all_reduce(total, out=total, order=order)
            speed *= np.float32(MOMENTUM)
            speed -= np.float32(LEARNING_RATE / step_size) * total[:-1]
            flat += speed
            loss += float(total[-1]) / steps.size
        guess = forward(views(flat), test_images)[1].argmax(axis=1)
        accuracy = float((guess == test_labels).mean())
        if comm.rank == 0:
            show(epoch + 1, loss, accuracy, time.perf_counter() - start)
    return flat, accuracy


def show_epoch(epoch: int, loss: float, accuracy: float, seconds: float) -> None:
    bar = "█" * round(32 * accuracy)
    print(
        f"   epoch {epoch:3}   loss {loss:.4f}   accuracy {accuracy:6.1%} {bar:32} "
        f"{seconds * 1e3:6.1f} ms",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a digit classifier data-parallel.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--save", metavar="FILE", help="write the parameters as float32")
    parser.add_argument("--order", default="tree", help="reduction order over the ranks (tree)")
    parser.add_argument("--quiet", action="store_true", help="do not show epochs")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs {args.epochs}: at least 1 is needed")
    with pycoll.init() as comm, threadpool_limits(1):  # a matrix product must not depend on n
        show = (lambda *_: None) if args.quiet else show_epoch
        flat, accuracy = train(comm, args.epochs, args.order, show)
        digest = np.frombuffer(hashlib.sha256(flat.tobytes()).digest(), np.uint8)
        digests = comm.all_gather(digest.reshape(1, -1))
        if not (digests == digest).all():
            raise SystemExit("ranks ended with different parameters")
        if comm.rank == 0 and not args.quiet:
            unseen = 1797 - TRAIN
            print(f"   final accuracy {accuracy:.1%} on {unseen} images that were not trained on")
        if comm.rank == 0 and args.save:
            flat.tofile(args.save)
