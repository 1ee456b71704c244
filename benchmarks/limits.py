"""Ordinary arrays beside the same by hand, on two ranks: ``python benchmarks/limits.py``.

What is compared, in the same two processes, in turn: pycoll, which takes ordinary arrays through
staging buffers (cells) or has the kernel copy them, whichever is faster; pycoll through cells; the
same by hand, in the segments that suit it best; one copy by the kernel, straight out of the other
process, as both MPIs do with large messages; and, beside an all-reduce, one pass over the array,
which each rank must make at least. Takes four minutes; writes results/limits.md and .json.
"""

import functools
import itertools
import mmap
import os
import statistics

import numpy as np
from harness import pages, start
from harness.ranks import SEGMENTS, ByHand, contest

from pycoll.cli.common.text import sized
from pycoll.runtime.selection.select import select

SIZES = (512 << 10, 1 << 20, 4 << 20, 16 << 20)
PAGES = {"huge": mmap.MADV_HUGEPAGE, "4 KiB": mmap.MADV_NOHUGEPAGE}
POOL_BYTES = 96 << 20  # of arrays in turn
BLOCK_BYTES = 32 << 20
TURN_BYTES, ROUNDS = 64 << 20, 15
MOVED = [("through cells", "cells"), ("staged by hand", "staged"), ("kernel copies", "read")]
COLUMNS = {
    "all_reduce": [("staged by hand", "staged"), ("one pass", "touch")],
    "reduce": [("staged by hand", "staged")],
    "broadcast": MOVED,
    "all_gather": MOVED,
    "all_to_all": MOVED,
}
BY_HAND = ("staged", "read")


class Pair(ByHand):
    """The functions of native/limit_staged.cpp."""

    def __init__(self, comm, library):
        super().__init__(comm, library)
        self._comm, self._refused = comm, np.zeros(1, np.int32)

    def may_read(self):
        """Tell whether the kernel has copied from process to process whenever it was asked to."""
        return not self._comm.all_reduce(self._refused, op="max")[0]

    def move(self, moves, segment):
        """Return the moves of a collective through cells, in segments of so many bytes."""
        own_to, own_from, send, receive, nbytes = moves
        return self.function("staged_move", own_to, own_from, send, receive, nbytes, segment)

    def read(self, moves, pid, there):
        """Return the moves made by letting the kernel copy; notes if it refuses."""
        own_to, own_from, _, receive, nbytes = moves
        function = self.function("read_move", own_to, own_from, receive, nbytes, pid, there)

        def call():
            if not function():
                self._refused[0] = 1

        return call


def arrays(slots, nbytes, pages):
    """Return arrays for use in turn, in one block on pages of that kind."""
    count = nbytes // 4
    pitch = count + 80
    block = mmap.mmap(-1, max(4 * slots * pitch, BLOCK_BYTES), mmap.MAP_PRIVATE)
    block.madvise(PAGES[pages])
    elements = np.frombuffer(block, np.float32)
    elements[:] = 0
    return [elements[i * pitch : i * pitch + count] for i in range(slots)]


def segments(nbytes):
    return [s for s in SEGMENTS if s <= nbytes]


def all_reduce(comm, pair, slots, nbytes, pages):
    """Return {name: functions, one for each slot}."""
    xs = arrays(slots, nbytes, pages)
    ways = {"pycoll": [functools.partial(comm.all_reduce, x, out=x) for x in xs]}
    ways["touch"] = [pair.function("touch", x, nbytes) for x in xs]
    for s in segments(nbytes):
        ways[f"staged {s}"] = [pair.function("staged_all_reduce", x, nbytes, s) for x in xs]
    return ways


def reduce(comm, pair, slots, nbytes, pages):
    """Return {name: functions, one for each slot}."""
    xs, outs = arrays(slots, nbytes, pages), arrays(slots, nbytes, pages)
    pairs = [(x, out if comm.rank == 0 else None) for x, out in zip(xs, outs, strict=True)]
    ways = {"pycoll": [functools.partial(comm.reduce, x, out=out) for x, out in pairs]}
    for s in segments(nbytes):
        ways[f"staged {s}"] = [
            pair.function("staged_reduce", x, out, nbytes, s) for x, out in pairs
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
    """Return for each set of moves in which process and where the other rank has what it sends."""
    sent = [m[2].ctypes.data if m[2] is not None else 0 for m in moves]
    pid, *there = comm.all_gather(np.array([[os.getpid(), *sent]]))[1 - comm.rank].tolist()
    return [(pid, address) for address in there]


def moved(name, comm, pair, slots, nbytes, pages):
    """Return {name: functions, one for each slot} of a collective that only moves data."""
    xs = arrays(slots, nbytes // 2 if name == "all_gather" else nbytes, pages)
    outs = xs if name == "broadcast" else arrays(slots, nbytes, pages)
    pairs = list(zip(xs, outs, strict=True))
    moves = [moves_of(name, comm.rank, *arrays) for arrays in pairs]
    collective, staged = getattr(comm, name), select(name, nbytes, 2).name
    ways = {"pycoll": [functools.partial(collective, x, out=out) for x, out in pairs]}
    ways["cells"] = [  # of whom names an algorithm, arrays go through cells
        functools.partial(collective, x, out=out, algorithm=staged) for x, out in pairs
    ]
    ways["read"] = [
        pair.read(move, *place) for move, place in zip(moves, places(comm, moves), strict=True)
    ]
    for s in segments(moves[0][-1]):
        ways[f"staged {s}"] = [pair.move(m, s) for m in moves]
    return ways


COLLECTIVES = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    **{name: functools.partial(moved, name) for name in ("broadcast", "all_gather", "all_to_all")},
}


def verify(comm, pair):
    """Stop if what is done by hand is not right."""
    count = SIZES[1] // 4

    def check(what, out, wanted):
        if (out.reshape(2, -1) != np.array(wanted)[:, None]).any():
            raise SystemExit(f"{what} is wrong")

    for s in SEGMENTS:
        x = np.full(count, comm.rank + 1, np.float32)
        pair.function("staged_all_reduce", x, x.nbytes, s)()
        check(f"all_reduce by hand in segments of {s} bytes", x, (3, 3))
        x, out = np.full(count, comm.rank + 1, np.float32), np.zeros(count, np.float32)
        pair.function("staged_reduce", x, out, x.nbytes, s)()
        check(f"reduce by hand in segments of {s} bytes", out, (3 * (comm.rank == 0),) * 2)
    for name, wanted in ("broadcast", (1, 1)), ("all_gather", (1, 2)), ("all_to_all", (1, 2)):
        for s in (*SEGMENTS, None):
            x = np.full(count // (1 + (name == "all_gather")), comm.rank + 1, np.float32)
            out = x if name == "broadcast" else np.zeros(count, np.float32)
            moves = moves_of(name, comm.rank, x, out)
            if s is not None:
                pair.move(moves, s)()
            else:
                pair.read(moves, *places(comm, [moves])[0])()
                if not pair.may_read():
                    continue
            check(f"{name} by hand, {f'segments of {s} bytes' if s else 'read'},", out, wanted)


def measure(comm, ways, nbytes):
    """Return {name: {"us": median, "x": how long it takes as a part of pycoll's time}}."""
    turn = itertools.count()  # of all: nobody finds arrays that another has just fetched

    def one(calls):
        calls[next(turn) % len(calls)]()

    count = max(8, TURN_BYTES // nbytes)
    turns = {name: (functools.partial(one, calls), count) for name, calls in ways.items()}
    times = contest(comm, turns, ROUNDS)
    return {
        name: {"us": statistics.median(own) * 1e6, "x": pages.ratio(own, times["pycoll"])}
        for name, own in times.items()
    }


def row_of(comm, pair, name, slots, nbytes, pages):
    """Measure one row of a table."""
    with comm.dup() as own:  # what it has found out about the arrays of other rows does not count
        found = measure(own, COLLECTIVES[name](own, pair, slots, nbytes, pages), nbytes)
    staged = [row for name, row in found.items() if name.startswith("staged")]
    row = {"collective": name, "bytes": nbytes, "pages": pages}
    row["arrays"] = "again" if slots == 1 else "in turn"
    row |= {"pycoll": found["pycoll"], "staged": min(staged, key=lambda f: f["x"])}
    row["touch"], row["cells"] = found.get("touch"), found.get("cells")
    row["read"] = found.get("read") if pair.may_read() else None
    return row


def rank(comm, library):
    pair = Pair(comm, library)
    verify(comm, pair)
    return [
        row_of(comm, pair, name, slots, nbytes, kind)
        for name, kind, nbytes in itertools.product(COLLECTIVES, PAGES, SIZES)
        for slots in (1, max(2, POOL_BYTES // nbytes))
    ]


def section(rows, collective, columns):
    """Return the lines about one collective; `columns` are (head, key in a row)."""
    place = " in place" if collective in ("all_reduce", "broadcast") else ""
    head = ["size", "pages", "arrays", "pycoll us"]
    head += [text for name, _ in columns for text in (f"{name} us", "x")]
    lines = []
    for row in (row for row in rows if row["collective"] == collective):
        cells = [sized(row["bytes"]), row["pages"], row["arrays"], f"{row['pycoll']['us']:.1f}"]
        for found in (row.get(key) for _, key in columns):
            cells += [f"{found['us']:.1f}", f"{found['x']:.2f}"] if found else ["", ""]
        lines.append(cells)
    return [f"## {collective}{place}", "", *pages.table(head, lines), ""]


def summary(rows):
    """Return the lines that tell of each collective how fast the best way by hand is."""
    for collective in COLUMNS:
        cells = [collective]
        for arrays in ("again", "in turn"):
            found = [
                min(row[key]["x"] for key in BY_HAND if row.get(key))
                for row in rows
                if (row["collective"], row["arrays"]) == (collective, arrays)
            ]
            mean = statistics.geometric_mean(found)
            cells += [f"{mean:.2f}", f"{min(found):.2f}-{max(found):.2f}"]
        yield cells


def main():
    args = pages.arguments(__doc__, "limits").parse_args()
    by_hand = {"source": "limit_staged.cpp", "flags": ["-march=native"]}
    rows = start.measure(__file__, 2, **by_hand)
    about = (
        "Two ranks, float32, medians. x: the time of that as a part of pycoll's, the median over "
        "rounds that took all in turn; above 1, pycoll is faster."
    )
    head = ["best by hand", "arrays again: mean", "range", "in turn: mean", "range"]
    lines = [*pages.table(head, summary(rows)), ""]
    lines += itertools.chain(*(section(rows, *item) for item in COLUMNS.items()))
    pages.write(args.name, "Ordinary arrays beside the least they cost", about, lines, rows=rows)


if __name__ == "__main__":
    start.main(main, rank)
