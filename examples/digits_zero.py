"""Train a digit classifier with ZeRO; stages 0 and 1 end with the same bits on 1, 2, 4 or 8 ranks.

    pycoll run -n 4 examples/digits_zero.py --zero 1        python examples/digits_zero.py

Prints what a rank keeps and sends, and the digest of the parameters at the end. Each rank takes its
share of eight micro-batches. Stages 2 and 3 reduce every micro-batch by itself, so their sums are
rounded differently for every number of ranks; docs/parallel.md says which runs agree to the bit.
"""

import argparse
import hashlib
from itertools import pairwise

import numpy as np
from threadpoolctl import threadpool_limits

import pycoll
from pycoll.parallel import AdamW, DataParallel, Mesh, Sequential, StepReport, estimate
from pycoll.parallel.nn import Chain, CrossEntropy, Linear, ReLU
from pycoll.parallel.random import Key

MICRO_BATCHES, MICRO_SIZE, TRAIN = 8, 32, 1437


def model() -> Sequential:
    layers = []
    for i, (inputs, outputs) in enumerate(pairwise((64, 96, 48, 10))):
        name = f"dense{i}"
        linear, last = Linear(inputs, outputs, Key(0).fold(name)), outputs == 10
        chain = [("linear", linear)] if last else [("linear", linear), ("relu", ReLU())]
        layers.append((name, Chain(*chain)))
    return Sequential(layers)


def load() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return (digits.data / 16).astype(np.float32)[order], digits.target[order]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a digit classifier with ZeRO.")
    parser.add_argument("--zero", type=int, default=0, choices=range(4))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--order", default="tree")
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    images, labels = load()
    with pycoll.init() as comm, Mesh(comm, dp=-1) as mesh, threadpool_limits(1):
        if MICRO_BATCHES % comm.world_size:
            problem = f"{MICRO_BATCHES} micro-batches do not divide among {comm.world_size} ranks"
            raise SystemExit(f"digits_zero: {problem}; take 1, 2, 4 or 8" if comm.rank == 0 else 1)
        options = {"zero": args.zero, "order": args.order, "precision": args.precision}
        options["optimizer"] = AdamW(lr=2e-3)
        engine = DataParallel(model(), CrossEntropy(), mesh, clip_norm=1.0, **options)
        own = np.split(np.arange(MICRO_BATCHES), comm.world_size)[comm.rank]
        reports: list[StepReport] = []
        for step in range(args.steps):
            rng = np.random.default_rng(step)  # the same batch on every rank
            batch = rng.choice(TRAIN, (MICRO_BATCHES, MICRO_SIZE), replace=False)
            report = engine.step([(images[batch[j]], labels[batch[j]]) for j in own])
            reports.append(report)
            if comm.rank == 0 and (step + 1) % 25 == 0:
                print(f"step {step + 1:4}  loss {report.loss:.4f}  norm {report.grad_norm:.4f}")
        report = reports[-1]
        guess = engine.predict(images[TRAIN:]).argmax(axis=1)
        params = engine.gather()
        digest = hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params)))
        if comm.rank == 0:
            print(f"accuracy {(guess == labels[TRAIN:]).mean():.1%} on unseen images")
            print(f"bytes sent per step: {report.bytes}; peak {report.peak_bytes:,} B; estimated:")
            print(estimate(model(), mesh=mesh, micro_batches=len(own), clip_norm=1.0, **options))
            print(f"params sha256={digest.hexdigest()} loss={report.loss:.6f}")


if __name__ == "__main__":
    main()
