"""Time calls of two ranks by where in a page their arrays begin: cache lines, or behind one.

``python benchmarks/places.py`` takes a quarter of a minute. Large arrays of NumPy begin 16 bytes
into a page, where malloc puts them; those of symmetric memory and of PyTorch on a cache line. It
should make little difference. All places take turns; a ratio is of the same round, and the median
counts. It prints a table and writes benchmarks/results/places.md and .json.
"""

import contextlib
import functools
import mmap
import statistics

import numpy as np
from harness import pages, start
from harness.ranks import contest, there_and_back

from pycoll.cli.common.text import sized

# Bytes into a page, of the input and of the result.
PLACES = {
    "both at byte 0": (0, 0),
    "16": (16, 16),
    "64": (64, 64),
    "2064": (2064, 2064),
    "input at 0, result at 16": (0, 16),
    "input at 0, result at 64": (0, 64),
}
SIZES = (8 << 10, 64 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20)
CALLS = {
    "all_reduce": ("all_reduce", np.float32, "sum"),
    "all_reduce of integers, avg": ("all_reduce", np.int32, "avg"),
    "broadcast": ("broadcast", np.float32, None),
    "all_gather": ("all_gather", np.float32, None),
    "all_to_all": ("all_to_all", np.float32, None),
    "message there and back": ("message", np.float32, None),
}
TURN_BYTES, ROUNDS = 16 << 20, 21
PAGE = mmap.PAGESIZE


def array(nbytes, dtype, place):
    """Return zeros that begin so many bytes into a page of 4 KiB."""
    block = mmap.mmap(-1, nbytes + PAGE, mmap.MAP_PRIVATE)
    block.madvise(mmap.MADV_NOHUGEPAGE)
    raw = np.frombuffer(block, np.uint8)
    raw[:] = 0
    return raw[place : place + nbytes].view(dtype)


def call_of(comm, name, dtype, op, nbytes, places):
    part = nbytes // comm.world_size if name == "all_gather" else nbytes
    x, out = array(part, dtype, places[0]), array(nbytes, dtype, places[1])
    if name == "message":
        return functools.partial(there_and_back, comm, x, out)
    return functools.partial(getattr(comm, name), x, out=out, **({"op": op} if op else {}))


def rank(comm):
    """Return the times of each kind of call and size, round by round in every place."""
    rows = []
    for title, call in CALLS.items():
        for nbytes in SIZES:
            count = max(3, min(200, TURN_BYTES // nbytes))
            with contextlib.ExitStack() as stack:
                ways = {  # arrays of one shape share what a communicator finds out about them
                    name: (call_of(stack.enter_context(comm.dup()), *call, nbytes, places), count)
                    for name, places in PLACES.items()
                }
                found = contest(comm, ways, ROUNDS)
            times = [found[name]["seconds"] for name in PLACES]
            rows.append({"call": title, "bytes": nbytes, "rounds": times})
    return rows


def line_of(row):
    cells = [row["call"], sized(row["bytes"])]
    for times in row["rounds"]:
        ratio = pages.ratio(times, row["rounds"][0])
        cells.append(f"{1e6 * statistics.median(times):.1f} us ({ratio:.2f})")
    return cells


def main():
    args = pages.arguments(__doc__, "places").parse_args()
    rows = start.measure(__file__, 2)
    about = (
        "Two ranks, ordinary arrays so many bytes into a page: medians, and how long that takes as "
        "a part of the first column's time, the median over rounds in which all took turns."
    )
    lines = pages.table(["call", "size", *PLACES], map(line_of, rows))
    pages.write(args.name, "Where arrays begin", about, lines, places=list(PLACES), rows=rows)


if __name__ == "__main__":
    start.main(main, rank)
