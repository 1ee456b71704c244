"""What tracing adds: to an `all_reduce` of 8 bytes, and to a step of training a GPT.

    python benchmarks/traced.py
    python benchmarks/traced.py --gpt

Traced and untraced times take turns on ranks that each have a core, if there are as many; medians
and quartiles count.
"""

import argparse
import os
import tempfile
import time

import numpy as np

from pycoll.parallel import AdamW, DataParallel, Mesh
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.testing import run_processes

CALLS, STEPS = 2000, 10  # at a time
TOKENS, BATCH = 64, 4  # of a sequence, and sequences of a rank


def calls(comm):
    """Return what makes calls, and how many."""
    x = comm.zeros(1, np.float64)

    def work():
        for _ in range(CALLS):
            comm.all_reduce(x, out=x)

    return work, CALLS


def steps(comm):
    """Return what takes steps of training, and how many."""
    model = GPT(TransformerConfig(128, 4, 4, length=TOKENS), seed=0)
    engine = DataParallel(model, model.loss(), Mesh(comm, dp=-1), optimizer=AdamW(1e-3))
    tokens = np.random.default_rng(comm.rank).integers(0, 256, (BATCH, TOKENS + 1))

    def work():
        for _ in range(STEPS):
            engine.step([(tokens[:, :-1], tokens[:, 1:])])

    return work, STEPS


def measure(comm, what, rounds):
    """Return times of one call or step in ns, a row without a trace and one with it."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= comm.world_size:
        os.sched_setaffinity(0, {cores[comm.rank]})
    work, times = what(comm)

    def once():
        comm.barrier()
        start = time.perf_counter_ns()
        work()
        return (time.perf_counter_ns() - start) / times

    for _ in range(3):
        once()
    found = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            found[0].append(once())
            with comm.trace(folder):
                found[1].append(once())
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--gpt", action="store_true", help="steps of training instead of calls")
    args = parser.parse_args()
    rows = run_processes(
        args.ranks, measure, steps if args.gpt else calls, args.rounds, timeout=600
    )
    unit, name = (1e6, "ms a step") if args.gpt else (1, "ns a call")
    for rank, (plain, traced) in enumerate(rows):
        (low, a, high), (_, b, _) = (np.percentile(t, [25, 50, 75]) / unit for t in (plain, traced))
        print(
            f"rank {rank}: {a:.4g} {name} (quartiles {low:.4g}, {high:.4g}), {b:.4g} traced: "
            f"{b - a:+.3g}, {b / a - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
