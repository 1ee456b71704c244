"""Time collectives of two ranks by where in a page their arrays begin: cache lines, or behind one.

``python benchmarks/places.py`` takes ten seconds. Large arrays of NumPy begin 16 bytes into a
page, where malloc puts them; those of symmetric memory and of PyTorch on a cache line. It should
make little difference. All places take turns; it prints a table of medians, and of each place how
long it takes as a part of the time of the first one.
"""

import functools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

import pycoll
from pycoll.cli.bench_report import sized
from pycoll.runtime.bootstrap import launched_by_us

sys.path.insert(0, str(Path(__file__).resolve().parent))
from overhead_ranks import batches

PLACES = (0, 16, 32, 64, 2064)  # bytes into a page
SIZES = (8 << 10, 64 << 10, 128 << 10, 512 << 10, 1 << 20)
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_to_all")
TURN_BYTES, ROUNDS = 16 << 20, 21
PAGE = 4096


def array(count, place):
    """Return zeros that begin so many bytes into a page."""
    raw = np.zeros(count * 4 + 2 * PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE + place
    return raw[start : start + count * 4].view(np.float32)


def calls(comm, name, nbytes):
    """Return for each place what to call."""
    part = nbytes // comm.world_size if name == "all_gather" else nbytes
    pairs = [(array(part // 4, place), array(nbytes // 4, place)) for place in PLACES]
    collective = getattr(comm, name)
    return [functools.partial(collective, x, out=out) for x, out in pairs]


def rank():
    """Measure; rank 0 prints a line of JSON for each collective and size."""
    with pycoll.init(tuning="off") as comm:
        for name in COLLECTIVES:
            for nbytes in SIZES:
                ways = calls(comm, name, nbytes)
                count = min(200, TURN_BYTES // nbytes)
                turns = [
                    [float(batches(comm, w, count, 1)[0]) for w in ways] for _ in range(ROUNDS)
                ]
                if comm.rank == 0:
                    print(json.dumps([name, nbytes, turns]), flush=True)


def row(name, nbytes, turns):
    """Return one line of the table."""
    cells = [name, sized(nbytes)]
    for way in zip(*turns, strict=True):
        ratio = statistics.median(t / turn[0] for t, turn in zip(way, turns, strict=True))
        cells.append(f"{1e6 * statistics.median(way):.1f} us ({ratio:.2f})")
    return f"| {' | '.join(cells)} |"


def main():
    """Start the ranks and print the table, or be one of them."""
    if launched_by_us():
        rank()
        return
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", __file__]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    heads = " | ".join(f"byte {place}" for place in PLACES)
    print(f"| collective | size | {heads} |", "|---" * (2 + len(PLACES)) + "|", sep="\n")
    for line in done.stdout.splitlines():
        print(row(*json.loads(line)))


if __name__ == "__main__":
    main()
