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
from pycoll.runtime.selection.select import select

sys.path.insert(0, str(Path(__file__).resolve().parent))
from overhead_ranks import batches, shared_map

SIZES = (512 << 10, 1 << 20, 4 << 20, 16 << 20)
SEGMENTS = (64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)
PAGES = {"huge": mmap.MADV_HUGEPAGE, "4 KiB": mmap.MADV_NOHUGEPAGE}
POOL_BYTES = 96 << 20  # of arrays in turn
BLOCK_BYTES = 32 << 20
BATCH_BYTES = 64 << 20
ROUNDS = 15
WARM = 4  # the first calls of a turn, one in so many, do not count


class ByHand:
    """The functions of limit_staged.cpp on memory that both ranks map."""

    def __init__(self, comm, library):
        self._library = ctypes.CDLL(library)
        self._library.staged_bytes.restype = ctypes.c_size_t
        self._library.read_move.restype = ctypes.c_bool
        self._rank, self._turn = comm.rank, ctypes.c_uint64(0)
        self._map = shared_map(comm, self._library.staged_bytes())
        self._memory = np.frombuffer(self._map, np.uint8)
        self._comm, self._refused = comm, np.zeros(1, np.int32)

    def may_read(self):
        """Tell whether the kernel has copied from process to process whenever it was asked to."""
        return not self._comm.all_reduce(self._refused, op="max")[0]

    def call(self, name, *arguments):
        """Call a function; arrays are passed by their address, numbers as they are."""
        passed = [
            ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_size_t(a or 0)
            for a in arguments
        ]
        memory = ctypes.c_void_p(self._memory.ctypes.data)
        turn = ctypes.byref(self._turn)
        return getattr(self._library, name)(memory, self._rank, turn, *passed)

    def move(self, moves, segment):
        """Make the moves of a collective through cells, in segments of so many bytes."""
        own_to, own_from, send, receive, nbytes = moves
        self.call("staged_move", own_to, own_from, send, receive, nbytes, segment)

    def read(self, moves, pid, there):
        """Make them by letting the kernel copy; notes if it refuses."""
        own_to, own_from, _, receive, nbytes = moves
        if not self.call("read_move", own_to, own_from, receive, nbytes, pid, there):
            self._refused[0] = 1


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


def moves_of(name, rank, x, out):
    """Return what a rank copies to itself, to and from, and what it sends and receives.

    And the bytes of each of these. None: it does not.
    """
    if name == "broadcast":
        return (None, None, x, None, x.nbytes) if rank == 0 else (None, None, None, x, x.nbytes)
    given, blocks = x.reshape(-1, out.size // 2), out.reshape(2, -1)
    mine, others = (x, x) if name == "all_gather" else (given[rank], given[1 - rank])
    return blocks[rank], mine, others, blocks[1 - rank], blocks[0].nbytes


def places(comm, moves):
    """Return of each set of moves in which process and where the other rank has what it sends."""
    sent = [m[2].ctypes.data if m[2] is not None else 0 for m in moves]
    pid, *there = comm.all_gather(np.array([[os.getpid(), *sent]]))[1 - comm.rank].tolist()
    return [pid] * len(there), there


def moved(name, comm, hand, slots, nbytes, pages):
    """Return {name: functions, one for each slot} of a collective that only moves data."""
    part = nbytes // 2 if name == "all_gather" else nbytes
    xs = arrays(slots, part // 4, pages)
    outs = xs if name == "broadcast" else arrays(slots, nbytes // 4, pages)
    moves = [moves_of(name, comm.rank, x, out) for x, out in zip(xs, outs, strict=True)]
    pids, there = places(comm, moves)
    collective, staged = getattr(comm, name), select(name, nbytes, 2).name
    pairs = list(zip(xs, outs, strict=True))
    ways = {"pycoll": [functools.partial(collective, x, out=out) for x, out in pairs]}
    ways["cells"] = [  # of whom names an algorithm, arrays go through cells
        functools.partial(collective, x, out=out, algorithm=staged) for x, out in pairs
    ]
    ways["read"] = [
        functools.partial(hand.read, *call) for call in zip(moves, pids, there, strict=True)
    ]
    for s in (s for s in SEGMENTS if s <= moves[0][-1]):
        ways[f"staged {s}"] = [functools.partial(hand.move, m, s) for m in moves]
    return ways


def reduce(comm, hand, slots, nbytes, pages):
    """Return {name: functions, one for each slot}."""
    xs, outs = arrays(slots, nbytes // 4, pages), arrays(slots, nbytes // 4, pages)
    pairs = [(x, out if comm.rank == 0 else None) for x, out in zip(xs, outs, strict=True)]
    ways = {"pycoll": [functools.partial(comm.reduce, x, out=out) for x, out in pairs]}
    for s in (s for s in SEGMENTS if s <= nbytes):
        ways[f"staged {s}"] = [
            functools.partial(hand.call, "staged_reduce", x, out, nbytes, s) for x, out in pairs
        ]
    return ways


COLLECTIVES = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    **{name: functools.partial(moved, name) for name in ("broadcast", "all_gather", "all_to_all")},
}


def verify(comm, hand):
    """Stop if what is done by hand is not right."""
    count = SIZES[1] // 4

    def check(what, out, wanted):
        if (out.reshape(2, -1) != np.array(wanted)[:, None]).any():
            raise SystemExit(f"{what} is wrong")

    for s in SEGMENTS:
        x = np.full(count, comm.rank + 1, np.float32)
        hand.call("staged_all_reduce", x, x.nbytes, s)
        check(f"all_reduce by hand in segments of {s} bytes", x, (3, 3))
        x, out = np.full(count, comm.rank + 1, np.float32), np.zeros(count, np.float32)
        hand.call("staged_reduce", x, out, x.nbytes, s)
        check(f"reduce by hand in segments of {s} bytes", out, (3 * (comm.rank == 0),) * 2)
    for name, wanted in ("broadcast", (1, 1)), ("all_gather", (1, 2)), ("all_to_all", (1, 2)):
        for s in (*SEGMENTS, None):
            x = np.full(count // (1 + (name == "all_gather")), comm.rank + 1, np.float32)
            out = x if name == "broadcast" else np.zeros(count, np.float32)
            moves = moves_of(name, comm.rank, x, out)
            if s is not None:
                hand.move(moves, s)
            else:
                hand.read(moves, *(there[0] for there in places(comm, [moves])))
                if not hand.may_read():
                    continue
            check(f"{name} by hand, {f'segments of {s} bytes' if s else 'read'},", out, wanted)


def measure(comm, ways, nbytes):
    """Return {name: {"us": median, "x": how long it takes as a part of pycoll's time}}."""
    turn = itertools.count()  # of all: nobody finds arrays that another has just fetched

    def one(name):
        ways[name][next(turn) % len(ways[name])]()

    calls = max(8, BATCH_BYTES // nbytes)
    rounds = {name: [] for name in ways}
    names, shuffle = list(ways), np.random.default_rng(0).shuffle  # the same on both ranks
    for _ in range(ROUNDS):
        shuffle(names)  # nobody is always after the same one
        for name in names:
            call = functools.partial(one, name)
            batches(comm, call, calls // WARM, 1)
            rounds[name].append(float(batches(comm, call, calls, 1)[0]) * 1e6)
    ours = np.array(rounds["pycoll"])
    return {
        name: {"us": float(np.median(us)), "x": float(np.median(np.array(us) / ours))}
        for name, us in rounds.items()
    }


def row_of(comm, hand, name, slots, nbytes, pages):
    """Measure one row of a table."""
    with comm.dup() as own:  # what it has found out about the arrays of other rows does not count
        found = measure(own, COLLECTIVES[name](own, hand, slots, nbytes, pages), nbytes)
    staged = [row for name, row in found.items() if name.startswith("staged")]
    row = {"collective": name, "bytes": nbytes, "pages": pages}
    row["arrays"] = "again" if slots == 1 else "in turn"
    row |= {"pycoll": found["pycoll"], "staged": min(staged, key=lambda f: f["x"])}
    row["touch"], row["cells"] = found.get("touch"), found.get("cells")
    row["read"] = found.get("read") if hand.may_read() else None
    return row


def main():
    path, library = sys.argv[1:]
    rows = []
    with pycoll.init(timeout=60, tuning="off") as comm:
        hand = ByHand(comm, library)
        verify(comm, hand)
        for name, pages, nbytes in itertools.product(COLLECTIVES, PAGES, SIZES):
            for slots in (1, max(2, POOL_BYTES // nbytes)):
                rows.append(row_of(comm, hand, name, slots, nbytes, pages))
        if comm.rank == 0:
            Path(path).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
