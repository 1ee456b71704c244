"""Pipelines as executed, beside formulas and PyTorch's: ``python benchmarks/pipelines.py``.

Layers sleep instead of computing, so that four stages do not need four cores. A forward pass, the
gradient of the input and that of the parameters of a stage take ``--ms`` milliseconds each, half
of it for each of two chunks; how long each really took is measured. The *bubble* is what a stage
waits of a step, as the engine reports it, on the stage that waits longest. *All but layers* is the
rest of a step on the busiest stage: the bubble, and the engine's own work between the layers.
How much slower code runs right after a sleep, as it does in every operation here, is measured too.
With PyTorch installed the same stages run on `torch.distributed.pipelining` over gloo, in the same
processes. There B and W are one operation, and so they are here for the comparison.
"""

import os
import tempfile
import time

import numpy as np
from harness import pages, start

from pycoll.parallel import SGD, Mesh, Pipeline, Sequential
from pycoll.parallel.pipeline import Costs, simulate
from pycoll.parallel.pipeline.proof import prove
from pycoll.parallel.pipeline.registry import SCHEDULES, find

MS = 20
STAGES, MICRO_BATCHES, STEPS = 4, 8, 3
NAMES = tuple(schedule.name for schedule in SCHEDULES)
OTHERS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
OTHERS_TOO = "others"
SAMPLES = 4
SMALL, LARGE = 1024, 65536  # features of float32: 16 KiB and 1 MiB in an activation


class Meter:
    """How long each pass of a stage's layers took, and most activations of them that were live."""

    def __init__(self):
        self.times, self.live, self.most = [], 0, 0

    def count(self, more):
        self.live += more
        self.most = max(self.most, self.live)


class Sleep:
    """A layer without parameters that takes its time."""

    def __init__(self, seconds, whole, meter):
        self.shares = {"F": seconds, "B": 2 * seconds if whole else seconds}
        self.shares["W"] = 0.0 if whole else seconds
        self.meter = meter

    def sleep(self, kind, live=0):
        began = time.perf_counter()
        self.meter.count(live)
        if self.shares[kind]:
            time.sleep(self.shares[kind])
        self.meter.times.append(time.perf_counter() - began)

    def parameters(self):
        return {}

    def forward(self, params, x):
        self.sleep("F", 1)
        return x, None

    def backward_input(self, params, saved, dy):
        self.sleep("B")
        return dy

    def backward_weight(self, params, saved, dy):
        self.sleep("W", -1)
        return {}


class Nothing:
    """A loss that takes no time."""

    def forward(self, x, targets):
        return 0.0, len(targets), x

    def backward(self, saved, scale):
        return saved


def ours(comm, name, ms=MS, features=SMALL, whole=False):
    """Return what a schedule takes and holds.

    Seconds of a step on the slowest rank, those that the busiest one slept, those that any rank
    waited at most, and for each stage most live activations, versions and arrays sent in a step.
    """
    batch = [(np.ones((SAMPLES, features), np.float32), np.zeros(SAMPLES, int))] * MICRO_BATCHES
    chunks, meter = find(name).chunks, Meter()
    count = STAGES * chunks
    layers = [(f"l{i}", Sleep(ms / 1e3 / chunks, whole, meter)) for i in range(count)]
    parts = Sequential(layers), Nothing()
    cut = [layer for layer, _ in layers[1:]]
    with (
        Mesh(comm, pp=STAGES) as mesh,
        Pipeline(*parts, mesh, name, MICRO_BATCHES, cut, optimizer=SGD(lr=0.1)) as engine,
    ):
        for _ in range(1 if find(name).steps == 1 else 3):
            engine.step(batch)
        found = []
        for _ in range(STEPS):
            meter.times.clear()
            report = engine.step(batch)
            found.append([report.seconds, sum(meter.times), sum(report.waits.values())])
        sent = report.bytes.get("pipeline", 0) / batch[0][0].nbytes
        held = comm.all_gather(np.array([[meter.most / chunks, engine.versions, sent]]))
        engine.flush()
    return [*slowest(comm, found), *held.T.tolist()]


def machine():
    """Return what the machine takes: seconds of a sleep, and of a loop before and behind one."""

    def loop():
        began = time.perf_counter()
        total = 0
        for number in range(200):
            total += number
        return time.perf_counter() - began

    rows = []
    for _ in range(20):
        loop()
        warm, began = loop(), time.perf_counter()
        time.sleep(MS / 1e3)
        rows.append([time.perf_counter() - began, warm, loop()])
    return np.median(rows, axis=0).tolist()


def slowest(comm, found):
    return comm.all_reduce(np.median(found, axis=0), "max").tolist()


def torch_stage(torch, slept):
    """Return a module that sleeps as a stage does; adds to ``slept[0]`` how long."""

    def sleep(seconds):
        began = time.perf_counter()
        time.sleep(seconds)
        slept[0] += time.perf_counter() - began

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            sleep(MS / 1e3)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            sleep(2 * MS / 1e3)
            return dy.contiguous(), None

    class Stage(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return Function.apply(x, self.weight)

    return Stage()


def theirs(comm, name, features):
    """Return the same of PyTorch; None without PyTorch."""
    try:
        import torch
        import torch.distributed as dist
        from torch.distributed import pipelining
    except ImportError:
        return None
    slept = [0.0]
    job = int(comm.broadcast(np.array([os.getpid()]))[0])
    place = f"{tempfile.gettempdir()}/pipelines-{job}-{name}-{features}"
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=comm.rank, world_size=STAGES
    )
    stage = pipelining.PipelineStage(
        torch_stage(torch, slept), comm.rank, STAGES, torch.device("cpu")
    )
    make = getattr(pipelining.schedules, OTHERS[name])
    schedule = make(stage, MICRO_BATCHES, lambda y, targets: y.sum())
    x = torch.ones(SAMPLES * MICRO_BATCHES, features)
    targets = torch.zeros(SAMPLES * MICRO_BATCHES, dtype=torch.int64)
    found = []
    for _ in range(STEPS + 1):
        before, began = slept[0], time.perf_counter()
        if comm.rank == 0:
            schedule.step(x)
        elif comm.rank == STAGES - 1:
            schedule.step(target=targets, losses=[])
        else:
            schedule.step()
        dist.barrier()
        found.append([time.perf_counter() - began, slept[0] - before])
    dist.destroy_process_group()
    return slowest(comm, found[1:])


def rank(comm, ms, *names):
    """Return what schedules need for a step, and if `OTHERS_TOO` is among them, what others do."""
    names = names or (*NAMES, OTHERS_TOO)
    found = {"machine": machine()}
    found["schedules"] = {name: ours(comm, name, float(ms)) for name in names if name != OTHERS_TOO}
    if OTHERS_TOO not in names:
        return found
    pairs = [
        [ours(comm, "1f1b", features=features)[0] for features in (SMALL, LARGE)] for _ in range(3)
    ]
    found["sizes"] = np.median(pairs, axis=0).tolist()
    found["torch"] = {
        f"{name}, {features * SAMPLES * 4 // 1024} KiB": [
            ours(comm, name, features=features, whole=True)[:2],
            theirs(comm, name, features),
        ]
        for name in OTHERS
        for features in (SMALL, LARGE)
    }
    return found


def bubble(seconds, busy):
    return 1 - busy / seconds


def schedule_lines(found):
    """Return a line for each schedule: what is executed beside the formula, where they differ."""
    for name, (seconds, busy, waited, *held) in found.items():
        schedule = find(name)
        program = schedule.program(STAGES, MICRO_BATCHES)
        proof = prove(program)
        formula = simulate(program).bubble_fraction if schedule.steps == 1 else 0.0
        shares = waited / seconds, bubble(seconds, busy)
        sends = [count / schedule.steps for count in proof.transfers]
        yield [
            name,
            f"{formula:.1%}",
            *(f"{share:.1%}" for share in shares),
            *(f"{share / formula:.2f}" if formula else "" for share in shares),
            f"{seconds * 1e3:.0f}",
            f"{seconds * (1 - formula) / busy:.3f}",
            *(
                beside(*pair)
                for pair in zip((proof.live, proof.versions, sends), held, strict=True)
            ),
        ]


def beside(formula, executed):
    """Return numbers by stage, and if others were measured these as well."""
    texts = [" ".join(f"{value:g}" for value in values) for values in (formula, executed)]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} (measured {texts[1]})"


def torch_lines(found):
    """Return a line for each comparison with PyTorch."""
    for name, (mine, other) in found.items():
        program = find(name.split(",")[0]).program(STAGES, MICRO_BATCHES)
        formula = simulate(program, Costs(backward=2.0, weight=0.0)).bubble_fraction
        yield [
            name,
            f"{formula:.1%}",
            f"{bubble(*mine):.1%}",
            f"{bubble(*other):.1%}",
            f"{mine[0] * 1e3:.0f}",
            f"{other[0] * 1e3:.0f}",
            f"{other[0] / mine[0]:.3f}",
        ]


def main():
    parser = pages.arguments(__doc__)
    text = f"these schedules alone; {OTHERS_TOO}: larger transfers, and PyTorch"
    parser.add_argument("schedules", nargs="*", help=text)
    text = f"of an operation of a stage ({MS}); comparisons with PyTorch have {MS}"
    parser.add_argument("--ms", type=float, default=MS, help=text)
    args = parser.parse_args()
    found = start.measure(__file__, STAGES, args.ms, *args.schedules, timeout=600)
    head = ["schedule", "bubble by the formula", "executed", "all but layers"]
    head += ["executed by formula", "all by formula", "ms of a step"]
    head += ["of the formula's time", "live activations", "versions", "arrays sent"]
    if found["schedules"]:
        print("\n".join(pages.table(head, list(schedule_lines(found["schedules"])))))
    slept, warm, cold = (seconds * 1e6 for seconds in found["machine"])
    print(
        f"\nA sleep of {MS} ms takes {slept - MS * 1e3:.0f} us more; a loop of {warm:.0f} us takes "
        f"{cold:.0f} us right behind one."
    )
    if "sizes" not in found:
        return
    small, large = found["sizes"]
    print(
        f"\n1f1b with {LARGE * SAMPLES * 4 >> 20} MiB in each transfer takes {large * 1e3:.1f} ms "
        f"a step, with {SMALL * SAMPLES * 4 >> 10} KiB {small * 1e3:.1f} ms: "
        f"{large / small - 1:+.1%}\n"
    )
    if all(other for _, other in found["torch"].values()):
        head = ["B and W in one", "bubble by the formula", "pycoll", "PyTorch on gloo"]
        head += ["ms of a step", "PyTorch's", "ratio"]
        print("\n".join(pages.table(head, list(torch_lines(found["torch"])))))


if __name__ == "__main__":
    start.main(main, rank)
