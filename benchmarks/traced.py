"""What tracing adds to a call: an `all_reduce` of 8 bytes in a world of one rank, traced and not.

    python benchmarks/traced.py

Both take turns, and the least time of each counts: on a busy machine the rest is what others did.
"""

import argparse
import tempfile
import time

import numpy as np

from pycoll.testing import run_threads

CALLS = 500  # at a time


def per_call_ns(comm, x, times):
    """Return the least time of a call."""
    found = []
    for _ in range(times):
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            comm.all_reduce(x, out=x)
        found.append((time.perf_counter_ns() - start) / CALLS)
    return min(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()

    def rank(comm):
        x = comm.zeros(1, np.float64)
        plain, traced = [], []
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(args.rounds):
                plain.append(per_call_ns(comm, x, 20))
                with comm.trace(folder):
                    traced.append(per_call_ns(comm, x, 20))
        return min(plain), min(traced)

    ((plain, traced),) = run_threads(1, rank)
    print(f"{plain:.0f} ns a call, {traced:.0f} ns traced: {traced - plain:+.0f} ns")


if __name__ == "__main__":
    main()
