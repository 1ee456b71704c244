"""Train a small network that goes on when ranks are killed, and takes them in again.

    pycoll run -n 4 --elastic examples/elastic.py --zero 2
    pycoll run -n 4 --elastic examples/elastic.py --zero 2 --gpt --steps 100

Kill any rank meanwhile (``kill -9``): the launcher starts it again, and the others give it the
state. The last line has a digest of the parameters; it is the same as without a death.
"""

import argparse
import hashlib
import time

import numpy as np
import python_text
from threadpoolctl import threadpool_limits

import pycoll
from pycoll.parallel import AdamW, DataParallel, Elastic, Mesh, Model, Sequential, WarmupCosine
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.parallel.nn import GELU, CrossEntropy, Linear
from pycoll.parallel.random import Key, integers, normal

FEATURES, CLASSES, HIDDEN, LENGTH = 32, 10, 64, 16
KEY = Key(0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a network that goes on when ranks are killed."
    )
    parser.add_argument("--zero", type=int, default=1, choices=range(4), help="ZeRO stage (1)")
    parser.add_argument("--gpt", action="store_true", help="train a tiny GPT on text instead")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes longer")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines (50)")
    return parser.parse_args()


def samples(step: int, numbers: range) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples with these numbers: inputs, and the class of the largest of some sums."""
    x = normal(KEY.fold("x"), (numbers.stop, FEATURES), (slice(numbers.start, numbers.stop),))
    truth = normal(KEY.fold("truth"), (FEATURES, CLASSES))
    return x.astype(np.float32), (x @ truth).argmax(axis=1)


class Windows:
    """Pieces of a text, by the numbers of samples."""

    def __init__(self) -> None:
        parts = [path.read_bytes() for path in python_text.library_files()[:20]]
        self.text = np.frombuffer(b"".join(parts), np.uint8)[:200_000]

    def __call__(self, step: int, numbers: range) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes, and those that follow them."""
        places = len(self.text) - LENGTH
        starts = integers(KEY.fold("text"), places, (numbers.stop,))[numbers.start :]
        rows = np.lib.stride_tricks.sliding_window_view(self.text, LENGTH + 1)[starts]
        return rows[:, :-1], rows[:, 1:]


def network(gpt: bool) -> Model:
    if gpt:
        return GPT(TransformerConfig(32, 4, 1, length=LENGTH), seed=0)
    return Sequential(
        [
            ("in", Linear(FEATURES, HIDDEN, key=KEY.fold("in"))),
            ("act", GELU()),
            ("out", Linear(HIDDEN, CLASSES, key=KEY.fold("out"))),
        ]
    )


def main() -> None:
    args = arguments()
    data = Windows() if args.gpt else samples

    def build(comm: pycoll.Communicator) -> DataParallel:
        model, mesh = network(args.gpt), Mesh(comm, dp=-1)
        return DataParallel(model, CrossEntropy(), mesh, zero=args.zero, optimizer=AdamW(lr=3e-3))

    rate = WarmupCosine(3e-3, 20, args.steps)
    with threadpool_limits(1):
        run = Elastic(
            pycoll.init(),
            build,
            data,
            steps=args.steps,
            batch=64,
            micro_batches=4,
            lr=rate,
        )
        for report in run:
            if run.comm.rank == 0:
                if run.change is not None:
                    print(f"{run.change} (at {time.monotonic():.3f})", flush=True)
                if run.step % args.every == 0 or run.change is not None:
                    print(f"step {run.step}: loss {report.loss:.4f}", flush=True)
            time.sleep(args.pause)
        digest = hashlib.sha256()
        for _, value in sorted(run.engine.gather().items()):
            digest.update(np.ascontiguousarray(value).tobytes())
        print(f"params sha256={digest.hexdigest()}", flush=True)
        run.close()


if __name__ == "__main__":
    main()
