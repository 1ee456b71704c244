"""Parameter servers when one worker is slow: how much more do they get done without waiting?

    python benchmarks/servers.py --slow 4 --seconds 5

Workers compute (sleep, or with ``--work core`` multiply matrices) and push; the first takes `slow`
times as long. Prints pushes per second of each mode and its ratio to the synchronous one, and how
stale the gradients were. The bar is 2 x for the asynchronous mode with a worker that is slowed 4 x.
"""

import argparse
import time

import numpy as np
from threadpoolctl import threadpool_limits

from pycoll.parallel import SGD, ParameterServer
from pycoll.testing import run_processes


def compute(work, seconds):
    """Be busy for so long, and return."""
    if work == "sleep":
        time.sleep(seconds)
        return
    until, x = time.thread_time() + seconds, np.ones((64, 64), np.float32)
    while time.thread_time() < until:
        x @= np.full_like(x, 1 / 64)


def measure(args, mode):
    """Return pushes per second, and what servers report."""

    def rank(comm):
        options = {"mode": mode, "staleness": args.staleness if mode == "ssp" else None}
        start = np.zeros(args.parameters, np.float32)
        with (
            threadpool_limits(1),
            ParameterServer(
                comm, start, servers=args.servers, optimizer=SGD(1e-3), **options
            ) as ps,
        ):
            comm.barrier()
            began = time.perf_counter()
            if ps.serves:
                ps.serve()
            else:
                factor = 1 if ps.worker else args.slow
                pushes = 0
                while time.perf_counter() - began < args.seconds:
                    gradient = ps.pull()
                    compute(args.work, args.ms / 1000 * factor)
                    ps.push(gradient)
                    pushes += 1
                ps.finish()
            taken = time.perf_counter() - began
            return 0 if ps.serves else pushes, taken, ps.report()

    results = run_processes(args.workers + args.servers, rank, timeout=10 * args.seconds + 30)
    return sum(r[0] for r in results) / max(r[1] for r in results), results[0][2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--slow", type=float, default=4.0, help="factor of the first worker (4)")
    parser.add_argument("--ms", type=float, default=20.0, help="of a step of the others (20)")
    parser.add_argument("--work", choices=("sleep", "core"), default="core")
    parser.add_argument("--staleness", type=int, default=8, help="bound of ssp (8)")
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each mode (5)")
    args = parser.parse_args()
    sync = None
    for mode in ("sync", "ssp", "async"):
        rate, report = measure(args, mode)
        sync = sync or rate
        total = sum(report.staleness.values())
        mean = sum(k * n for k, n in report.staleness.items()) / total
        print(
            f"{mode:6} {rate:7.1f} pushes/s   {rate / sync:4.2f} x sync   staleness: mean "
            f"{mean:.1f}, most {max(report.staleness)}   lead: most {max(report.lead)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
