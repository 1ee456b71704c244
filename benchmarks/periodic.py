"""What averaging every n steps costs in accuracy: digits and a tiny GPT, beside every step.

    python benchmarks/periodic.py --every 8

Replicas train on samples of their own, with the same number of steps in all rows. Bars at n = 8:
local SGD and DiLoCo within 1 % of the accuracy of every-step averaging on digits, and within 2 % of
its loss on the GPT.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from pycoll.parallel import SGD, AdamW, Average, DataParallel, DiLoCo, Gossip, Mesh, Sequential
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.parallel.nn import CrossEntropy, Linear, ReLU
from pycoll.parallel.random import Key, integers
from pycoll.testing import run_processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import python_text

KEY = Key(4)
BATCH = 16  # of a replica


class Digits:
    """Handwritten digits: the share of the test that is wrong."""

    name, unit, steps, bar = "digits", "accuracy", 400, 0.01

    def __init__(self):
        from sklearn.datasets import load_digits

        found = load_digits()
        self.x, self.y = (found.data / 16).astype(np.float32), found.target
        self.last = 1437

    def model(self):
        return Sequential(
            [("a", Linear(64, 48, KEY)), ("r", ReLU()), ("b", Linear(48, 10, KEY.fold("b")))]
        )

    def optimizer(self, averaging):
        return SGD(0.05, momentum=0.9) if not isinstance(averaging, DiLoCo) else SGD(0.1)

    def batch(self, step, place):
        chosen = integers(KEY.fold("order", step, place), self.last, (BATCH,))
        return self.x[chosen], self.y[chosen]

    def score(self, engine):
        rows = engine.predict(self.x[self.last :])
        return float((rows.argmax(axis=1) == self.y[self.last :]).mean())


class Text:
    """A tiny GPT on the source of Python's library: the loss on text held out."""

    name, unit, steps, bar, length = "GPT", "loss", 400, 0.02, 32

    def __init__(self):
        files = [path.read_bytes() for path in python_text.library_files()[:60]]
        text = np.frombuffer(b"".join(files), np.uint8)[:1_000_000]
        self.rows = np.lib.stride_tricks.sliding_window_view(text, self.length + 1)
        self.last = len(self.rows) - 50_000

    def model(self):
        return GPT(TransformerConfig(32, 4, 1, length=self.length), seed=0)

    def optimizer(self, averaging):
        return AdamW(lr=4e-3)

    def batch(self, step, place):
        rows = self.rows[integers(KEY.fold("order", step, place), self.last, (BATCH,))]
        return rows[:, :-1], rows[:, 1:]

    def score(self, engine):
        places = integers(KEY.fold("test"), len(self.rows) - self.last, (256,)) + self.last
        rows = self.rows[places]
        total, count, _ = CrossEntropy().forward(engine.predict(rows[:, :-1]), rows[:, 1:])
        return total / count


def train(comm, task, steps, settings):
    """Return the score of a training on the replicas of `comm`."""
    optimizer = task.optimizer(settings.get("averaging"))
    mesh, model = Mesh(comm, replica=-1), task.model()
    with (
        threadpool_limits(1),
        DataParallel(model, CrossEntropy(), mesh, optimizer=optimizer, **settings) as engine,
    ):
        sent = 0
        for step in range(steps):
            report = engine.step([task.batch(step, comm.rank)])
            sent += sum(report.bytes.get(k, 0) for k in ("average", "replica gradient"))
        if "sync_every" in settings:
            engine.average()
        return task.score(engine), sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, help="of each training")
    parser.add_argument("--outer-lr", type=float, default=0.7, help="of DiLoCo (0.7)")
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="of DiLoCo (0.9)")
    args = parser.parse_args()
    outer = SGD(args.outer_lr, momentum=args.outer_momentum, nesterov=args.outer_momentum > 0)
    ways = {
        "every step": {},
        "local SGD": {"averaging": Average()},
        "local SGD, momentum averaged": {"averaging": Average(states=True)},
        "DiLoCo": {"averaging": DiLoCo(outer)},
        "gossip": {"averaging": Gossip()},
    }
    for task in (Digits(), Text()):
        steps, plain = args.steps or task.steps, None
        for way, settings in ways.items():
            settings = settings and {"sync_every": args.every, **settings}
            found = run_processes(args.ranks, train, task, steps, settings, timeout=600)[0]
            score, sent = found
            plain = plain or score
            print(
                f"{task.name:7} {way:29} {task.unit} {score:.4f}   {score / plain - 1:+.2%} "
                f"(bar {task.bar:.0%})   {sent / 1e6:7.2f} MB sent",
                flush=True,
            )


if __name__ == "__main__":
    main()
