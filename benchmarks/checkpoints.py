"""How fast checkpoints are written beside dd, and what a save in the background adds to steps.

    python benchmarks/checkpoints.py --mib 256 --ranks 2 --folder /var/tmp

The bars are 80 % of dd to the same disk, and 5 % of a step. Saves and dd take turns; what a save
deletes of older ones is not in its time, as dd deletes nothing.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time

import numpy as np
from threadpoolctl import threadpool_limits

from pycoll.parallel import SGD, DataParallel, Mesh, ParameterSpec, Sequential, save
from pycoll.parallel.nn import CrossEntropy
from pycoll.testing import run_processes


class Sleeping:
    """A layer with a large parameter, which takes a given time, as on an accelerator."""

    def __init__(self, count, seconds):
        self.count, self.seconds = count, seconds

    def parameters(self):
        return {"weight": ParameterSpec((self.count,), init=lambda shape: np.ones(shape, "f4"))}

    def forward(self, params, x):
        time.sleep(self.seconds)
        return x, None

    def backward_input(self, params, saved, dy):
        return dy

    def backward_weight(self, params, saved, dy):
        return {"weight": np.zeros(self.count, np.float32)}


def dd(folder, mib):
    """Return bytes per second of dd, until they are on the disk."""
    path = os.path.join(folder, "dd")
    begun = time.perf_counter()
    words = ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={mib // 4}", "conv=fsync"]
    subprocess.run(words, check=True, capture_output=True)
    taken = time.perf_counter() - begun
    os.unlink(path)
    return mib * 2**20 / taken


def rank(comm, args, folder):
    """Return rates of dd, seconds of saves, of steps alone, and of steps beside saves."""
    count = args.mib * 2**20 // 4 // 2  # of it the momentum is as large again
    model = Sequential([("layer", Sleeping(count, args.step_ms / 1000))])
    x = np.zeros((4, 3), np.float32), np.zeros(4, int)
    settings = {"zero": 1, "optimizer": SGD(0.0, momentum=0.9)}
    with (
        threadpool_limits(1),
        DataParallel(model, CrossEntropy(), Mesh(comm, dp=-1), **settings) as engine,
    ):
        engine.step([x])

        def timed(call):
            comm.barrier()
            begun = time.perf_counter()
            call()
            comm.barrier()
            return time.perf_counter() - begun

        def steps(saving):
            if saving:
                save(folder, engine, keep=1, background=True)
            for _ in range(args.steps):
                engine.step([x])
            if saving:
                engine.saving.wait()

        rates, saves = [], []
        for _ in range(args.rounds):
            if comm.rank == 0:
                rates.append(dd(folder, args.mib))
            saves.append(timed(lambda: save(folder, engine)))
            timed(lambda: save(folder, engine, keep=1))
        pairs = [(timed(lambda: steps(False)), timed(lambda: steps(True))) for _ in saves]
        return rates, saves, pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="size of a checkpoint (256)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="between two saves (50)")
    parser.add_argument("--step-ms", type=float, default=200.0, help="that a step sleeps (200)")
    parser.add_argument("--folder", help="on the disk to measure")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(dir=args.folder)
    try:
        plain, saves, pairs = run_processes(args.ranks, rank, args, folder, timeout=3600)[0]
    finally:
        shutil.rmtree(folder)
    speed = args.mib * 2**20 / statistics.median(saves)
    one = statistics.median(plain)
    print(
        "dd", *(f"{x / 1e9:.2f}" for x in plain), "GB/s; saves", *(f"{x:.2f}" for x in saves), "s"
    )
    added = statistics.median(beside / alone - 1 for alone, beside in pairs)
    print(f"dd {one / 1e9:.2f} GB/s; save {speed / 1e9:.2f} GB/s, {speed / one:.0%} of it")
    print(f"a save in the background every {args.steps} steps adds {added:.1%} to a step")


if __name__ == "__main__":
    main()
