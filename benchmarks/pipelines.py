"""The bubble of pipelines as executed, beside the formula: ``python benchmarks/pipelines.py``.

Layers sleep instead of computing, so that four stages do not need four cores. A forward pass, the
gradient of the input and that of the parameters of a stage take `MS` milliseconds each.
"""

import statistics
import time

import numpy as np
from harness import pages, start

from pycoll.parallel import SGD, Mesh, Pipeline, Sequential
from pycoll.parallel.nn import CrossEntropy
from pycoll.parallel.pipeline import simulate
from pycoll.parallel.pipeline.registry import find

MS = 20
STAGES, MICRO_BATCHES, STEPS = 4, 8, 3
NAMES = ("naive", "gpipe", "1f1b", "interleaved:2", "zb_h1", "zb_v", "dualpipe_v")


class Sleep:
    """A layer without parameters that takes its time."""

    def __init__(self, seconds):
        self.seconds = seconds

    def parameters(self):
        return {}

    def forward(self, params, x):
        time.sleep(self.seconds)
        return x, None

    def backward_input(self, params, saved, dy):
        time.sleep(self.seconds)
        return dy

    def backward_weight(self, params, saved, dy):
        time.sleep(self.seconds)
        return {}


def rank(comm):
    """Return the seconds of a step of each schedule, on the slowest rank."""
    x = np.ones((4, 1024), np.float32)
    batch = [(x, np.zeros(4, int))] * MICRO_BATCHES
    found = {}
    for name in NAMES:
        chunks = find(name).chunks
        layers = [(f"l{i}", Sleep(MS / 1e3 / chunks)) for i in range(STAGES * chunks)]
        with (
            Mesh(comm, pp=STAGES) as mesh,
            Pipeline(
                Sequential(layers), CrossEntropy(), mesh, name, MICRO_BATCHES, optimizer=SGD(lr=0.1)
            ) as engine,
        ):
            engine.step(batch)
            seconds = [engine.step(batch).seconds for _ in range(STEPS)]
        found[name] = float(comm.all_reduce(np.array(statistics.median(seconds)), "max"))
    return found


def main():
    pages.arguments(__doc__).parse_args()
    found = start.measure(__file__, STAGES, timeout=180)
    lines = []
    for name, seconds in found.items():
        timing = simulate(find(name).program(STAGES, MICRO_BATCHES))
        busy = 3 * MICRO_BATCHES * MS / 1e3
        executed = 1 - busy / seconds
        formula = timing.bubble_fraction
        wanted = busy / (1 - formula)
        lines.append(
            [
                name,
                f"{formula:.1%}",
                f"{executed:.1%}",
                f"{seconds * 1e3:.0f}",
                f"{seconds / wanted:.3f}",
            ]
        )
    head = [
        "schedule",
        "bubble by the formula",
        "executed",
        "ms of a step",
        "of the formula's time",
    ]
    print("\n".join(pages.table(head, lines)))


if __name__ == "__main__":
    start.main(main, rank)
