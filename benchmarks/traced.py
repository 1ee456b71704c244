"""What tracing adds: to an `all_reduce` of 8 bytes, and to a step of training a GPT.

    python benchmarks/traced.py
    python benchmarks/traced.py --gpt

Traced and untraced times take turns on ranks that each have a core, if there are as many; the
median and the quartiles of what one takes more than the other before it count. They are short, so
that other programs disturb few of them. The thread that writes the trace works in the background:
what it costs some core is counted by itself.

How the linker has placed the functions, and where memory lies, move the times of calls by some ns
between builds, and between runs of one: to compare two builds takes many of each.
"""

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy makes threads, more than cores

import numpy as np

from pycoll.parallel import AdamW, DataParallel, Mesh
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.testing import run_processes

CALLS, STEPS = 300, 20  # at a time
CALLS_FIRST = 30  # after which the ranks are in step
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
    """Return times of one call or step in ns: untraced, traced, and of the thread that writes."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= comm.world_size:
        os.sched_setaffinity(0, {cores[comm.rank]})
    work, times = what(comm)
    x = comm.zeros(1, np.float64)

    def once():
        for _ in range(CALLS_FIRST):
            comm.all_reduce(x, out=x)
        start = time.perf_counter_ns()
        work()
        return (time.perf_counter_ns() - start) / times

    for _ in range(3):
        once()
    plain, traced = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            plain.append(once())
            with comm.trace(folder):
                traced.append(once())
        with comm.trace(folder):
            start = of_writer_ns()
            for _ in range(rounds):
                once()
            writing = (of_writer_ns() - start) / times / rounds
    return plain, traced, writing


def of_writer_ns():
    """Return the time that cores have spent on the thread that writes the trace."""
    thread = next(t for t in threading.enumerate() if t.name == "pycoll trace")
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="600, or 100 with --gpt")
    parser.add_argument("--gpt", action="store_true", help="steps of training instead of calls")
    args = parser.parse_args()
    what, rounds = (steps, 100) if args.gpt else (calls, 600)
    rows = run_processes(args.ranks, measure, what, args.rounds or rounds, timeout=600)
    unit, name = (1e6, "ms a step") if args.gpt else (1, "ns a call")
    for rank, (plain, traced, writing) in enumerate(rows):
        plain, traced = np.array(plain) / unit, np.array(traced) / unit
        low, more, high = np.percentile(traced - plain, [25, 50, 75])
        usual = np.median(plain)
        print(
            f"rank {rank}: {usual:.4g} {name}, traced {more:+.3g}, {more / usual:+.1%} "
            f"(quartiles {low:+.3g}, {high:+.3g}); the thread that writes: {writing / unit:.3g}"
        )


if __name__ == "__main__":
    main()
