"""What the two ranks of benchmarks/limits.py do.

``pycoll run -n 2 benchmarks/limits_ranks.py FILE LIBRARY``
"""

import ctypes
import functools
import itertools
import json
import mmap
import os
import sys
from pathlib import Path

import numpy as np

import pycoll
from pycoll.runtime.select import select

sys.path.insert(0, str(Path(__file__).resolve().parent))
from overhead_ranks import batches, shared_map

SIZES = (512 << 10, 1 << 20, 4 << 20, 16 << 20)
SEGMENTS = (64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)
PAGES = {"huge": mmap.MADV_HUGEPAGE, "4 KiB": mmap.MADV_NOHUGEPAGE}
POOL_BYTES = 96 << 20  # of arrays in turn
BLOCK_BYTES = 32 << 20
BATCH_BYTES = 16 << 20
ROUNDS = 21


class ByHand:
    """The functions of limit_staged.cpp on memory that both ranks map."""

    def __init__(self, comm, library):
        self._library = ctypes.CDLL(library)
        self._library.staged_bytes.restype = ctypes.c_size_t
        self._library.read_all_gather.restype = ctypes.c_bool
        self._rank, self._turn = comm.rank, ctypes.c_uint64(0)
        self._map = shared_map(comm, self._library.staged_bytes())
        self._memory = np.frombuffer(self._map, np.uint8)
        self.may_read = True

    def call(self, name, *arguments):
        """Call a function; arrays are passed by their address, numbers as they are."""
        passed = [
            ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_size_t(a)
            for a in arguments
        ]
        memory = ctypes.c_void_p(self._memory.ctypes.data)
        turn = ctypes.byref(self._turn)
        return getattr(self._library, name)(memory, self._rank, turn, *passed)

    def read(self, x, out, pid, there):
        """Gather by letting the kernel copy; notes if it refuses."""
        self.may_read = (
            self.call("read_all_gather", x, out, out.nbytes, pid, there) and self.may_read
        )


def arrays(slots, count, pages):
    """Return arrays for use in turn, in one block on pages of that kind."""
    pitch = count + 80
    block = mmap.mmap(-1, max(4 * slots * pitch, BLOCK_BYTES), mmap.MAP_PRIVATE)
    block.madvise(PAGES[pages])
    elements = np.frombuffer(block, np.float32)
    elements[:] = 0
    return [elements[i * pitch : i * pitch + count] for i in range(slots)]


def all_reduce(comm, hand, slots, nbytes, pages):
    """Return {name: functions, one for each slot}."""
    xs = arrays(slots, nbytes // 4, pages)
    ways = {"pycoll": [lambda x=x: comm.all_reduce(x, out=x) for x in xs]}
    ways["touch"] = [lambda x=x: hand.call("touch", x, nbytes) for x in xs]
    for s in (s for s in SEGMENTS if s <= nbytes):
        ways[f"staged {s}"] = [
            lambda x=x, s=s: hand.call("staged_all_reduce", x, nbytes, s) for x in xs
        ]
    return ways


def all_gather(comm, hand, slots, nbytes, pages):
    """Return {name: functions, one for each slot}."""
    xs, outs = arrays(slots, nbytes // 8, pages), arrays(slots, nbytes // 4, pages)
    pairs = list(zip(xs, outs, strict=True))
    others = comm.all_gather(np.array([[os.getpid(), *(x.ctypes.data for x in xs)]]))
    pid, *there = others[1 - comm.rank].tolist()
    ways = {"pycoll": [lambda x=x, out=out: comm.all_gather(x, out=out) for x, out in pairs]}
    name = select("all_gather", nbytes, 2).name  # of whom names it, arrays go through cells
    ways["cells"] = [
        lambda x=x, out=out: comm.all_gather(x, out=out, algorithm=name) for x, out in pairs
    ]
    ways["read"] = [
        lambda x=x, out=out, at=at: hand.read(x, out, pid, at)
        for (x, out), at in zip(pairs, there, strict=True)
    ]
    for s in (s for s in SEGMENTS if s <= nbytes):
        ways[f"staged {s}"] = [
            lambda x=x, out=out, s=s: hand.call("staged_all_gather", x, out, nbytes, s)
            for x, out in pairs
        ]
    return ways


def verify(comm, hand):
    """Stop if what is done by hand is not right."""
    for s in SEGMENTS:
        x = np.full(SIZES[1] // 4, comm.rank + 1, np.float32)
        hand.call("staged_all_reduce", x, x.nbytes, s)
        half = np.full(x.size // 2, comm.rank + 1, np.float32)
        out = np.zeros(x.size, np.float32)
        hand.call("staged_all_gather", half, out, out.nbytes, s)
        if (x != 3).any() or (out.reshape(2, -1) != [[1], [2]]).any():
            raise SystemExit(f"a collective by hand is wrong in segments of {s} bytes")


def measure(comm, ways, nbytes):
    """Return {name: {"us": median, "x": how long it takes as a part of pycoll's time}}."""
    turn = itertools.count()  # of all: nobody finds arrays that another has just fetched

    def one(name):
        ways[name][next(turn) % len(ways[name])]()

    calls = max(4, BATCH_BYTES // nbytes)
    rounds = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, found in rounds.items():
            call = functools.partial(one, name)
            batches(comm, call, 1, 1)
            found.append(float(batches(comm, call, calls, 1)[0]) * 1e6)
    ours = np.array(rounds["pycoll"])
    return {
        name: {"us": float(np.median(us)), "x": float(np.median(np.array(us) / ours))}
        for name, us in rounds.items()
    }


def row_of(comm, hand, make, slots, nbytes, pages):
    """Measure one row of a table."""
    found = measure(comm, make(comm, hand, slots, nbytes, pages), nbytes)
    staged = [row for name, row in found.items() if name.startswith("staged")]
    row = {"collective": make.__name__, "bytes": nbytes, "pages": pages}
    row["arrays"] = "again" if slots == 1 else "in turn"
    row |= {"pycoll": found["pycoll"], "staged": min(staged, key=lambda f: f["x"])}
    row["touch"], row["cells"] = found.get("touch"), found.get("cells")
    row["read"] = found.get("read") if hand.may_read else None
    return row


def main():
    path, library = sys.argv[1:]
    rows = []
    with pycoll.init(timeout=60, tuning="off") as comm:
        hand = ByHand(comm, library)
        verify(comm, hand)
        for make, pages, nbytes in itertools.product((all_reduce, all_gather), PAGES, SIZES):
            for slots in (1, max(2, POOL_BYTES // nbytes)):
                rows.append(row_of(comm, hand, make, slots, nbytes, pages))
        if comm.rank == 0:
            Path(path).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
