"""What averaging every n steps costs in accuracy: digits and a tiny GPT, beside every step.

    python benchmarks/periodic.py --every 8
    python benchmarks/periodic.py --every 8 --first 0 --outer-momentum 0.9
    python benchmarks/periodic.py --seed 1 --rates 0.7 1

Replicas train on samples of their own, with the same number of steps in all rows. Learning rates
warm up, then fall by a cosine; each row has the best of the peaks `--rates`, times one that is the
best of 0.5, 1, 2 times itself for averaging in every step on the GPT. The first fifth of the
steps is averaged every time. Bars at n = 8: local SGD and DiLoCo within 1 % of the accuracy of
every-step averaging on digits (a mean of several trainings, as one of 360 samples is 0.3 %), and
within 2 % of its loss on the GPT.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from pycoll.parallel import (
    SGD,
    AdamW,
    Average,
    DataParallel,
    DiLoCo,
    Gossip,
    Mesh,
    Sequential,
    WarmupCosine,
)
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.parallel.nn import CrossEntropy, Linear, ReLU
from pycoll.parallel.random import Key, integers
from pycoll.testing import run_processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import python_text

BATCH = 16  # of a replica


class Digits:
    """Handwritten digits: the share of the test that is right."""

    name, unit, steps, bar, trainings, best = "digits", "accuracy", 400, 0.01, 5, max
    optimizer = SGD(0.1, momentum=0.9)

    def __init__(self, seed):
        self.key = Key(seed)
        from sklearn.datasets import load_digits

        found = load_digits()
        self.x, self.y = (found.data / 16).astype(np.float32), found.target
        self.last = 1437

    def model(self):
        key = self.key
        return Sequential(
            [("a", Linear(64, 48, key)), ("r", ReLU()), ("b", Linear(48, 10, key.fold("b")))]
        )

    def batch(self, step, place):
        chosen = integers(self.key.fold("order", step, place), self.last, (BATCH,))
        return self.x[chosen], self.y[chosen]

    def score(self, engine):
        rows = engine.predict(self.x[self.last :])
        return float((rows.argmax(axis=1) == self.y[self.last :]).mean())


class Text:
    """A tiny GPT on the source of Python's library: the loss on text held out."""

    name, unit, steps, bar, trainings, best = "GPT", "loss", 1600, 0.02, 1, min
    optimizer, length = AdamW(1.6e-2), 32

    def __init__(self, seed):
        self.key = Key(seed)
        files = [path.read_bytes() for path in python_text.library_files()[:60]]
        text = np.frombuffer(b"".join(files), np.uint8)[:1_000_000]
        self.rows = np.lib.stride_tricks.sliding_window_view(text, self.length + 1)
        self.last = len(self.rows) - 50_000

    def model(self):
        return GPT(TransformerConfig(32, 4, 1, length=self.length), seed=0)

    def batch(self, step, place):
        rows = self.rows[integers(self.key.fold("order", step, place), self.last, (BATCH,))]
        return rows[:, :-1], rows[:, 1:]

    def score(self, engine):
        places = integers(self.key.fold("test"), len(self.rows) - self.last, (1024,)) + self.last
        rows = self.rows[places]
        total, count, _ = CrossEntropy().forward(engine.predict(rows[:, :-1]), rows[:, 1:])
        return total / count


def train(comm, kind, first, steps, settings, factor):
    """Return the mean score of trainings on the replicas of `comm`, and bytes that one has sent."""
    mesh, optimizer, scores = Mesh(comm, replica=-1), kind.optimizer, []
    peak = optimizer.lr * factor
    rate = WarmupCosine(peak, steps // 20, steps, floor=peak / 10)
    for seed in range(first, first + kind.trainings):
        task, sent = kind(seed), 0
        with (
            threadpool_limits(1),
            DataParallel(
                task.model(), CrossEntropy(), mesh, optimizer=optimizer, **settings
            ) as engine,
        ):
            for step in range(steps):
                report = engine.step([task.batch(step, comm.rank)], lr=rate(step))
                sent += sum(report.bytes.get(k, 0) for k in ("average", "replica gradient"))
            if settings:
                engine.average()
            scores.append(task.score(engine))
    return np.mean(scores), sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, help="of each training")
    parser.add_argument("--first", type=float, default=0.2, help="part that is averaged each step")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0], help="factors to try")
    parser.add_argument("--seed", type=int, default=0, help="of the first training (0)")
    parser.add_argument("--outer-lr", type=float, default=0.7, help="of DiLoCo (0.7)")
    parser.add_argument("--outer-momentum", type=float, default=0.7, help="of DiLoCo (0.7)")
    args = parser.parse_args()
    outer = SGD(args.outer_lr, momentum=args.outer_momentum, nesterov=args.outer_momentum > 0)
    ways = {
        "every step": {},
        "local SGD": {"averaging": Average()},
        "local SGD, momentum averaged": {"averaging": Average(states=True)},
        "DiLoCo": {"averaging": DiLoCo(outer)},
        "gossip": {"averaging": Gossip()},
    }
    for task in (Digits, Text):
        steps, plain = args.steps or task.steps, None
        for way, settings in ways.items():
            if settings:
                settings |= {"sync_every": args.every, "sync_after": int(args.first * steps)}
            tried = []
            for factor in args.rates:
                whom = train, task, args.seed, steps, settings, factor
                tried.append((*run_processes(args.ranks, *whom, timeout=600)[0], factor))
            score, sent, factor = task.best(tried)
            plain = plain or score
            print(
                f"{task.name:7} {way:29} {task.unit} {score:.4f}   {score / plain - 1:+.2%} "
                f"(bar {task.bar:.0%})   {sent / 1e6:7.2f} MB sent   rate x {factor:g}",
                flush=True,
            )


if __name__ == "__main__":
    main()
