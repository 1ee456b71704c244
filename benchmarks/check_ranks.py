"""What the two ranks of benchmarks/check.py do.

``pycoll run -n 2 benchmarks/check_ranks.py FILE LIBRARY``
"""

import json
import sys
from pathlib import Path

import numpy as np

import pycoll

sys.path.insert(0, str(Path(__file__).resolve().parent))
from overhead_ranks import Limit, batches

SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20)
RUNS = 15
RUN_BYTES = 32 << 20  # a run moves about so much, and makes at least 4 calls, at most 500
SLOTS = 4


def memory(comm, count, symmetric):
    """Return arrays to use in turn, laid out like those of the plain loop."""
    make = comm.zeros if symmetric else np.zeros
    return [row[:count] for row in make((SLOTS, count + 80), np.float32)]


def measure(comm, library, nbytes):
    """Return the speed of pycoll as a part of that of the plain loop, for both kinds of memory."""
    count = nbytes // 4
    calls = int(min(500, max(4, RUN_BYTES // nbytes)))
    limit = Limit(comm, library, count, SLOTS)
    turn = iter(range(1 << 30))
    arrays = {name: memory(comm, count, name == "symmetric") for name in ("symmetric", "ordinary")}

    def ours(name):
        x = arrays[name][next(turn) % SLOTS]
        comm.all_reduce(x, out=x)

    seconds = {name: [] for name in ("plain", *arrays)}
    for name in arrays:
        batches(comm, lambda name=name: ours(name), 2 * SLOTS, 2)
    batches(comm, lambda: limit(2 * SLOTS), 1, 2)
    for _ in range(RUNS):
        seconds["plain"] += list(batches(comm, lambda: limit(calls), 1, 1) / calls)
        for name in arrays:
            seconds[name] += list(batches(comm, lambda name=name: ours(name), calls, 1))
    plain = np.median(seconds["plain"])
    found = {name: float(plain / np.median(seconds[name])) for name in arrays}
    return found | {"plain_us": float(plain * 1e6)}


def main():
    path, library = sys.argv[1:]
    with pycoll.init(timeout=60) as comm:
        found = {str(nbytes): measure(comm, library, nbytes) for nbytes in SIZES}
        if comm.rank == 0:
            Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
