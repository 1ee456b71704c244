"""How much of the communication of a training step hides behind its computation.

    python benchmarks/training.py [--ranks 2] [--layers 8] [--ms 20] [--mib 16] [--work sleep|core]
        [--loss-ms 0]

Each layer has one parameter of --mib MiB, a backward pass of --ms milliseconds, half of it for each
gradient, and a forward pass of half that; between the two passes the loss takes --loss-ms. Ranks
sleep, as if an accelerator computed, or keep their core busy with matrix products. Medians of all
rounds; in each, in turn and per step: three steps without other ranks (compute), all collectives of
a step alone, one after the other (wire), and three steps of all ranks, one right after the other.
hidden = 1 - (time the steps waited for gradients and parameters) / wire; max is the larger one of
compute and wire.
"""

import statistics
import time

import numpy as np
from harness import pages
from harness.ranks import batches
from threadpoolctl import threadpool_limits

from pycoll.parallel import SGD, DataParallel, Mesh, ParameterSpec, Sequential
from pycoll.testing import run_processes

STEPS = 3


class Takes:
    """What takes time."""

    def __init__(self, seconds, work):
        self.seconds, self.work = seconds, work
        self.square = np.ones((64, 64), np.float32)

    def compute(self, seconds):
        if self.work == "sleep":
            time.sleep(seconds)
        end = time.thread_time() + seconds  # of this thread: what others take comes on top
        while self.work == "core" and time.thread_time() < end:
            self.square @ self.square


class Busy(Takes):
    """A layer; its gradient is written where the engine wants it."""

    def __init__(self, count, seconds, work):
        super().__init__(seconds, work)
        self.count = count

    def parameters(self):
        return {"weight": ParameterSpec((self.count,))}

    def forward(self, params, x):
        self.compute(self.seconds / 2)
        return x, None

    def backward_input(self, params, saved, dy):
        self.compute(self.seconds / 2)
        return dy

    def backward_weight(self, params, saved, dy, out=None):
        self.compute(self.seconds / 2)
        out["weight"][:1] = 1
        return out


class Loss(Takes):
    """A loss of which nothing is used."""

    def forward(self, logits, targets):
        self.compute(self.seconds)
        return 0.0, 1, None

    def backward(self, saved, scale):
        return np.zeros(1)


def collectives(engine, zero, memory):
    """Run what a step sends, one after the other, on memory like the engine's."""
    channel = engine.groups.shards
    full, shard = memory
    for _ in engine.buckets:
        if zero == 0:
            channel.all_reduce(full, "x", "tree").wait()
            continue
        channel.reduce_scatter(full, shard, "x", "tree").wait()
        for _ in range(2 if zero == 3 else 1):
            channel.all_gather(shard, full, "x").wait()


def measure(comm, args, zero):
    count = (args.mib << 20) // 4

    def model():
        layers = [(f"l{i}", Busy(count, args.ms / 1e3, args.work)) for i in range(args.layers)]
        return Sequential(layers)

    options = {"optimizer": SGD(0.0), "bucket_bytes": 4 * count, "start": "trust"}
    loss = Loss(args.loss_ms / 1e3, args.work)
    alone = DataParallel(model(), loss, Mesh(comm.split(comm.rank), dp=1), **options)
    together = DataParallel(model(), loss, Mesh(comm, dp=-1), zero=zero, **options)
    memory = [comm.zeros(count), comm.zeros(count // comm.world_size)]
    rows = [measure_round(comm, alone, together, zero, memory) for _ in range(args.rounds + 1)]
    return [statistics.median(column) for column in zip(*rows[1:], strict=True)]


def measure_round(comm, alone, together, zero, memory):
    """Return seconds per step: compute, wire, step, waited for gradients, for parameters."""
    sample, waits = [(np.zeros(1), None)], []

    def steps(engine):
        waits[:] = [engine.step(sample).waits for _ in range(STEPS)]
        engine.settle()

    compute = batches(comm, lambda: steps(alone), 1, 1)[0] / STEPS
    wire = batches(comm, lambda: collectives(together, zero, memory), 1, 1)[0]
    together.step(sample)
    step = batches(comm, lambda: steps(together), 1, 1)[0] / STEPS
    waited = [sum(w.get(what, 0.0) for w in waits) / STEPS for what in ("gradient", "parameter")]
    return compute, wire, step, *comm.all_reduce(np.array(waited), "max")


def main():
    parser = pages.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ms", type=float, default=20.0)
    parser.add_argument("--loss-ms", type=float, default=0.0)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--work", choices=["sleep", "core"], default="sleep")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--zero", type=int, nargs="*", default=list(range(4)))
    args = parser.parse_args()
    what = f"{args.layers} layers of {args.mib} MiB and {args.ms:g} ms ({args.work})"
    print(f"{args.ranks} ranks, {what}; milliseconds")
    heads = ("stage", "compute", "wire", "step", "for gradients", "for parameters", "hidden")
    print("".join(f"{head:>15}" for head in (*heads, "step / max")))
    for zero in args.zero:
        with threadpool_limits(1):
            row = run_processes(args.ranks, measure, args, zero, timeout=300)[0]
        compute, wire, step, gradients, parameters = (1e3 * x for x in row)
        times = "".join(f"{x:15.1f}" for x in (compute, wire, step, gradients, parameters))
        hidden = 1 - (gradients + parameters) / wire
        print(f"{zero:>15}{times}{hidden:>15.0%}{step / max(compute, wire):>15.2f}", flush=True)


if __name__ == "__main__":
    main()
