"""Processes that share the device train one model, and each trains it alone: the same bits.

Started by ``pycoll run``. So does a run that keeps activations and states on the host. Beside them
stands the engine on the CPU, whose layers round differently.
"""

import contextlib
import importlib
import sys
import time

import numpy as np
from common import MIB, open_stage, row_of_all, same_bits, skip

import pycoll
from pycoll.parallel import AdamW, DataParallel, Mesh, Sequential
from pycoll.parallel.nn import CrossEntropy, Linear, ReLU
from pycoll.parallel.random import Key

STEPS, FEATURES, CLASSES, ROWS = 3, 24, 5, 64
CLOSE = 1e-4


# Where array-api-compat is not installed, these have copies of it that know CuPy as well.
COPIES = (
    "sklearn.externals.array_api_compat",
    "scipy._external.array_api_compat",
    "scipy._lib.array_api_compat",
)


def find_array_api():
    """Let pycoll import array-api-compat, or a copy in its place; return which, None for none."""
    for name in ("array_api_compat", *COPIES):
        with contextlib.suppress(ImportError):
            sys.modules["array_api_compat"] = importlib.import_module(name)
            return name
    return None


def layers():
    key = Key(0)
    return Sequential(
        [
            ("a", Linear(FEATURES, 129, key.fold("a"))),
            ("b", ReLU()),
            ("c", Linear(129, CLASSES, key.fold("c"))),
        ]
    )


def batch(step, part):
    """Return inputs and targets of a part of a batch."""
    rng = np.random.default_rng([step, part])
    x = rng.standard_normal((ROWS, FEATURES), np.float32)
    return x, x[:, :CLASSES].argmax(axis=1)


def train(comm, parts, **options):
    """Train on some parts of each batch; return parameters, losses, seconds of each step."""
    settings = {"optimizer": AdamW(lr=1e-2), "clip_norm": 1.0, **options}
    with Mesh(comm, dp=-1) as mesh, DataParallel(layers(), CrossEntropy(), mesh, **settings) as run:
        losses, seconds = [], []
        for step in range(STEPS):
            start = time.perf_counter()
            losses.append(run.step([batch(step, p) for p in parts]).loss)
            seconds.append(round(time.perf_counter() - start, 6))
        return run.gather(), losses, seconds


def compare(comm, writer, zero):
    """Compare a run of all ranks with one of this rank and one on the CPU."""
    n, options = comm.world_size, {"zero": zero, "bucket_bytes": 8 << 10}
    found, losses, seconds = train(comm, [comm.rank], device="cuda", **options)
    cpu, *_ = train(comm, [comm.rank], **options)
    far = max(float(abs(found[name] - value).max()) for name, value in cpu.items())
    good = losses[-1] < losses[0] and far < CLOSE
    away, its_losses, _ = train(comm, [comm.rank], device="cuda", offload="all", **options)
    good &= its_losses == losses and all(same_bits(found[k], v) for k, v in away.items())
    if zero < 2 and n & (n - 1) == 0:  # one order of sums for all ways to divide the micro-batches
        with comm.split(comm.rank) as own:
            alone, its_losses, _ = train(own, range(n), device="cuda", **options)
        good &= its_losses == losses and all(same_bits(found[k], v) for k, v in alone.items())
    facts = {"zero": zero, "loss": losses[-1], "from_cpu": far, "seconds": seconds}
    row_of_all(comm, writer, "training", good, **facts)


def main(part=""):
    writer, _ = open_stage()
    found = find_array_api()
    if found is None:
        skip(writer, "array-api-compat is not installed, and nor is a copy of it")
    print(f"array functions: {found}", flush=True)
    with pycoll.init(device_heap_bytes=16 * MIB, timeout=60) as comm:
        for zero in (0,) if part == "--offload" else range(4):
            compare(comm, writer, zero)


if __name__ == "__main__":
    main(*sys.argv[1:])
