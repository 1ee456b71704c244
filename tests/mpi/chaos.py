"""A soak over MPI: that of tests/chaos.py, but no process dies, which an MPI rarely survives.

    python tests/mpi/chaos.py [--rounds 100] [--seed 1] [--ranks 4] [--bound 3]

Run it with the interpreter whose mpi4py and launcher are to be used. Every round makes a new
communicator of some of the ranks, on one host or pretended to be on several, runs random correct
calls against the oracle, and ends with a random fault or none. It stops at the first surprise and
prints the seed that repeats it. Over messages who waits in vain asks all ranks for a second, and
those ask others in turn: errors of a rank that is stopped take longer than on one host.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support")]

import numpy as np  # noqa: E402

import chaos  # noqa: E402
import mpirun  # noqa: E402
from faults import Event  # noqa: E402
from pycoll.config import STRICT  # noqa: E402

KINDS = [kind for kind in chaos.FAULTS if kind not in ("kill", "exit")]
ROUND_S = 60.0  # how long one may take, beside other work


class FileEvent(Event):
    """When something happened on one rank, in a file that all ranks map."""

    def __init__(self, path):
        self._time = np.memmap(path, np.float64, "r+", shape=1)


def hosts_of(rng, n):
    """Return a number of a host for each rank: one host, several, or each rank on its own."""
    return rng.choice([[0] * n, sorted(rng.randrange(2) for _ in range(n)), list(range(n))])


def take_part(world, seed, path, bound_s):
    """Play this rank's part of a round; return the fault, and what went wrong."""
    from mpi4py import MPI

    from pycoll.testing import on_hosts

    rng = random.Random(seed)
    n = rng.randrange(2, world.size + 1)
    hosts = hosts_of(rng, n)
    todo, sizes = chaos.draw(rng, n)
    fault = chaos.Fault(rng, n, KINDS, FileEvent(path))
    fault._event._time[0] = 0
    fault.bound_s, fault.limit_s = bound_s, bound_s / 10
    part = world.Split(0 if world.rank < n else MPI.UNDEFINED, world.rank)
    if part == MPI.COMM_NULL:
        return fault.kind, []
    settings = {"cell_bytes": rng.choice([4096, 65_536, 262_144]), "heap_bytes": 1 << 28}
    settings["strict"] = rng.choice(STRICT)
    try:
        comm = on_hosts(hosts, part, timeout_s=max(10.0, 3 * bound_s), **settings)
        wrong = chaos.play(comm, todo, sizes, fault)
        comm.close()
    except BaseException:
        about = f"hosts {hosts}, strict={settings['strict']}, fault {fault.kind}"
        about += f" of rank {fault.victim}, here rank {part.rank}"
        wrong = [about, traceback.format_exc()]
    return fault.kind, wrong


def play_rounds(first, rounds, path, bound_s):
    """Play rounds on every rank; end the job at the first surprise."""
    from mpi4py import MPI

    world, seen = MPI.COMM_WORLD, Counter()
    for seed in range(first, first + rounds):
        kind, wrong = take_part(world, seed, path, bound_s)
        seen[kind] += 1
        lines = [line for part in world.allgather(wrong) for line in part]
        if lines and world.rank == 0:
            sys.stdout.write(f"--seed {seed}:\n" + "\n".join(lines) + "\n")
            sys.stdout.flush()
        if lines:
            world.Barrier()
            world.Abort(1)
    if world.rank == 0:
        sys.stdout.write(f"{sum(seen.values())} rounds without a surprise: {dict(seen)}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="of the first round")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--bound", type=float, default=3.0, help="seconds until all have heard")
    parser.add_argument("--path", help=argparse.SUPPRESS)
    args = parser.parse_args()
    seed = int(time.time()) << 20 if args.seed is None else args.seed
    if args.path:
        play_rounds(seed, args.rounds, args.path, args.bound)
        return
    with tempfile.NamedTemporaryFile() as file:
        np.zeros(1).tofile(file.name)
        words = ["--rounds", args.rounds, "--seed", seed, "--path", file.name]
        words += ["--bound", args.bound]
        process = mpirun.launch(args.ranks, __file__, list(map(str, words)))
        try:
            sys.stdout.write(mpirun.finish(process, ROUND_S * args.rounds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
        sys.exit(process.returncode)


if __name__ == "__main__":
    main()
