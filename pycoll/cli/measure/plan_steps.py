"""Training steps of layouts, measured here, beside what was predicted for them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import numpy as np

from pycoll.comm import Communicator
from pycoll.parallel import DataParallel, estimate
from pycoll.parallel.analysis.layouts import MICRO_BATCHES, Layout
from pycoll.parallel.analysis.planner import Prediction
from pycoll.parallel.analysis.workload import Speed, Workload
from pycoll.parallel.context.split import Context
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.pipeline.engine import Pipeline

_TIMES = 5


@dataclass(frozen=True)
class Measured:
    """Steps of one layout, as the slowest rank saw them.

    Attributes:
        seconds: Median of the steps.
        peak: Most bytes of parameters, gradients, states and buffers on any rank, by its ledger.
        told: The same as estimated, if activations are offloaded: then they are among them.
    """

    seconds: float
    peak: int
    told: int = 0


def measured(comm: Communicator, work: Workload, layout: Layout, precision: str) -> Measured:
    """Train a few steps as a layout says, on tokens that are all alike."""
    axes = {axis: size for axis, size in layout.mesh.items() if layout.schedule or axis != "pp"}
    make = Pipeline if layout.schedule else DataParallel
    sizes = (work.hidden, work.heads, work.layers, work.vocabulary, work.sequence)
    tokens = np.ones((layout.micro_batch, work.sequence), int)
    seconds, peak, told = [], 0, 0
    with Mesh(comm, **axes) as mesh:
        split = mesh.tp if layout.mesh["tp"] > 1 else None
        context = Context(mesh.cp) if layout.size("cp") > 1 else None
        mine = tokens if context is None else context.take(tokens)
        batch = [(mine, mine)] * layout.micro_batches
        model = GPT(TransformerConfig(*sizes, comm=split, context=context), seed=0)
        with make(model, model.loss(), mesh, precision=precision, **layout.arguments) as engine:
            if layout.offloads("activations"):
                given = {"micro_batches": layout.micro_batches, **layout.arguments}
                given["stage"] = getattr(engine, "stage", 0)
                told = estimate(model, precision, axes, sample=batch[0], **given).peak
            for _ in range(1 + _TIMES):
                comm.barrier()
                started = time.perf_counter()
                peak = max(peak, engine.step(batch).peak_bytes)
                seconds.append(time.perf_counter() - started)
    own = np.array([statistics.median(seconds[1:]), peak, told], float)
    slowest = comm.all_reduce(own, op="max")
    return Measured(float(slowest[0]), *map(int, slowest[1:]))


def speed(comm: Communicator, work: Workload, batch: int, precision: str) -> Speed:
    """Return how fast a rank computes while all ranks do, by steps of one layer.

    A step of three micro-batches has two more than one of a single one; what is left of that is the
    step's own.
    """
    one = replace(work, layers=1)
    flops = 3 * (one.layer_flops() + one.logits_flops())
    found, rest = {}, []
    with comm.split(color=comm.rank) as alone:
        for size in (size for size in MICRO_BATCHES if size <= batch):
            took = []
            for times in (1, 3):
                layout = Layout({"dp": 1, "pp": 1, "tp": 1}, size, times, 0, "none", None)
                comm.barrier()
                took.append(measured(alone, one, layout, precision).seconds)
            single, triple = comm.all_reduce(np.array(took), op="max").tolist()
            each = max(triple - single, 0.1 * triple) / 2
            found[size] = size * flops / each
            rest.append(single - each)
    return Speed(found, max(0.0, statistics.median(rest)) / one.parameters, overlap=False)


def network(comm: Communicator) -> str:
    """Describe what joins the ranks as a switch, by the times of a small and a large sum."""
    n, times = comm.world_size, []
    for count in (2, 1 << 20):
        x, taken = np.ones(count, np.float32), []
        for _ in range(10):
            comm.barrier()
            started = time.perf_counter()
            comm.all_reduce(x, order="any")
            taken.append(time.perf_counter() - started)
        times.append(statistics.median(taken))
    small, large = comm.all_reduce(np.array(times), op="max").tolist()
    rounds = 2 * max(1, (n - 1).bit_length())
    rate = 2 * (n - 1) / n * (4 << 20) / max(large - small, 1e-6)
    return f"switch:bw={rate / 1e9:.4f}G,latency={1e9 * small / rounds:.0f}ns,fold=1000T"


def row(prediction: Prediction, found: Measured) -> list[str]:
    """Say how far a prediction is off, in time and in bytes."""
    peak = found.told or prediction.states.peak
    return [
        f"{1e3 * prediction.seconds:.3g} ms",
        f"{1e3 * found.seconds:.3g} ms",
        f"{prediction.seconds / found.seconds - 1:+.0%}",
        f"{peak / 1e6:.4g} MB",
        f"{found.peak / 1e6:.4g} MB",
        f"{peak / found.peak - 1:+.2%}",
    ]
