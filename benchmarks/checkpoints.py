"""How fast checkpoints are written beside dd, and what a save in the background adds to steps.

    python benchmarks/checkpoints.py --mib 256 --ranks 2 --folder /var/tmp

The bars are 80 % of dd to the same disk, and 5 % of a step. Saves take turns with one dd, and with
as many dd at once as there are ranks; what a save deletes of older ones is not in its time, as dd
deletes nothing.
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


def dd(folder, mib, count=1):
    """Return bytes per second of `count` dd at once, until they are on the disk."""
    paths = [os.path.join(folder, f"dd{i}") for i in range(count)]
    words = ["dd", "if=/dev/zero", "bs=4M", f"count={mib // 4 // count}", "conv=fsync"]
    begun = time.perf_counter()
    running = [subprocess.Popen([*words, f"of={p}"], stderr=subprocess.DEVNULL) for p in paths]
    failed = any([process.wait() for process in running])
    taken = time.perf_counter() - begun
    if failed:
        raise OSError(f"dd cannot write in {folder}")
    for path in paths:
        os.unlink(path)
    return mib // 4 // count * count * 4 * 2**20 / taken


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
                rates.append((dd(folder, args.mib), dd(folder, args.mib, comm.world_size)))
            saves.append(timed(lambda: save(folder, engine)))
            timed(lambda: save(folder, engine, keep=1))
        rounds = args.rounds if args.steps else 0
        pairs = [(timed(lambda: steps(False)), timed(lambda: steps(True))) for _ in range(rounds)]
        return rates, saves, pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="size of a checkpoint (256)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="between two saves (50); 0: none")
    parser.add_argument("--step-ms", type=float, default=200.0, help="that a step sleeps (200)")
    parser.add_argument("--folder", help="on the disk to measure")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(dir=args.folder)
    try:
        plain, saves, pairs = run_processes(args.ranks, rank, args, folder, timeout=3600)[0]
    finally:
        shutil.rmtree(folder)
    size = args.mib * 2**20
    shown("saves", [size / x for x in saves])
    for name, at in (("one dd", 0), (f"{args.ranks} dd at once", 1)):
        rates = [pair[at] for pair in plain]
        shown(name, rates)
        share = size / statistics.median(saves) / statistics.median(rates)
        each = sorted(size / x / y for x, y in zip(saves, rates, strict=True))
        print(f"  saves have {share:.0%} of it; round by round {each[0]:.0%} to {each[-1]:.0%}")
    if args.steps:
        added = [beside / alone - 1 for alone, beside in pairs]
        print(
            f"a save in the background every {args.steps} steps of {args.step_ms:g} ms adds "
            f"{statistics.median(added):.1%} to a step ({min(added):.1%} to {max(added):.1%})"
        )


def shown(name, rates):
    middle = statistics.median(rates)
    print(f"{name}: {middle / 1e9:.2f} GB/s ({min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f})")


if __name__ == "__main__":
    main()
