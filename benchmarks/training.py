"""How much of the communication of a training step hides behind its backward pass.

    python benchmarks/training.py [--ranks 2] [--layers 8] [--ms 20] [--mib 16] [--work sleep|core]

Each layer has one parameter of --mib MiB and a backward pass of --ms milliseconds: asleep, as if an
accelerator computed, or busy on this rank's core. Medians of all rounds; in each, in turn: the step
without other ranks (compute), the gradient reductions alone, one after the other (reduce), and the
step of all ranks. hidden = 1 - (time the step waited for gradients) / reduce. Stages 1 to 3 also
hand parameters out, which is not behind the backward pass: the time waited for that is shown.
"""

import argparse
import statistics
import time

import numpy as np

from pycoll.parallel import SGD, DataParallel, Mesh, ParameterSpec, Sequential
from pycoll.testing import run_processes


class Busy:
    """A layer that takes time and hands over a gradient that is already there."""

    def __init__(self, count, seconds, work):
        self.gradient, self.seconds, self.work = np.ones(count, np.float32), seconds, work

    def parameters(self):
        return {"weight": ParameterSpec(self.gradient.shape)}

    def forward(self, params, x):
        return x, None

    def backward_input(self, params, saved, dy):
        return dy

    def backward_weight(self, params, saved, dy):
        end, x = time.perf_counter() + self.seconds, np.ones(4096)
        if self.work == "sleep":
            time.sleep(self.seconds)
        while time.perf_counter() < end:
            np.sqrt(x, out=x)
        return {"weight": self.gradient[:]}


class Nothing:
    def forward(self, logits, targets):
        return 0.0, 1, None

    def backward(self, saved, scale):
        return np.zeros(1)


def timed(comm, call):
    comm.barrier()
    start = time.perf_counter()
    call()
    mine = time.perf_counter() - start
    return float(comm.all_reduce(np.array([mine]), "max")[0])


def reductions(engine, zero):
    """Reduce every bucket, one after the other."""
    groups = engine.groups
    for bucket in engine.buckets:
        full = np.empty(bucket.layout.padded, np.float32) if zero > 1 else bucket.parameter.data
        if zero:
            shard = np.empty(full.size // groups.shards.world_size, full.dtype)
            groups.shards.reduce_scatter(full, shard, "x", "tree").wait()
        else:
            groups.shards.all_reduce(full, "x", "tree").wait()


def measure(comm, args, zero):
    count = (args.mib << 20) // 4

    def model():
        layers = [(f"l{i}", Busy(count, args.ms / 1e3, args.work)) for i in range(args.layers)]
        return Sequential(layers)

    options = {"optimizer": SGD(0.0), "bucket_bytes": 4 * count, "start": "trust"}
    alone = DataParallel(model(), Nothing(), Mesh(comm.split(comm.rank), dp=1), **options)
    together = DataParallel(model(), Nothing(), Mesh(comm, dp=-1), zero=zero, **options)
    sample, rows, waits = [(np.zeros(1), None)], [], []
    for _ in range(args.rounds + 1):
        compute = timed(comm, lambda: alone.step(sample))
        wire = timed(comm, lambda: reductions(together, zero))
        step = timed(comm, lambda: waits.append(together.step(sample).waits))
        waited = [waits[-1].get(purpose, 0.0) for purpose in ("gradient", "parameter")]
        rows.append((compute, wire, step, *comm.all_reduce(np.array(waited), "max")))
    return [statistics.median(column) for column in zip(*rows[1:], strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ms", type=float, default=20.0)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--work", choices=["sleep", "core"], default="sleep")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    what = f"{args.layers} layers of {args.mib} MiB and {args.ms:g} ms ({args.work})"
    print(f"{args.ranks} ranks, {what}; milliseconds")
    heads = ("stage", "compute", "reduce", "step", "for gradients", "for parameters", "hidden")
    print("".join(f"{head:>15}" for head in (*heads, "step / max")))
    for zero in range(4):
        row = run_processes(args.ranks, measure, args, zero, timeout=300)[0]
        compute, wire, step, gradients, parameters = (1e3 * x for x in row)
        times = "".join(f"{x:15.1f}" for x in (compute, wire, step, gradients, parameters))
        print(f"{zero:>15}{times}{1 - gradients / wire:>15.0%}{step / max(compute, wire):>15.2f}")


if __name__ == "__main__":
    main()
