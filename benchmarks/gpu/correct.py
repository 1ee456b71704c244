"""Every algorithm on virtual ranks gives the bits of the engine on the CPU.

correct.py [--few | --float8 | --packets]
"""

import sys

import numpy as np
from common import data, dtypes, methods_of, nonsense, open_stage, same_bits, to_device

import pycoll
from pycoll.algorithms import ALGORITHMS
from pycoll.config import Config
from pycoll.cuda.calls.virtual import VirtualRanks
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.testing import run_threads

WORLDS = (2, 4, 8)
BLOCK = 5003  # odd: chunks of unequal length, and tails that fill no vector
SMALL = (7, 15, 77, 1001)  # less than a packet, and tails behind whole ones
LARGE = 1_000_003  # gives every rank many blocks, and every block several turns


def options_of(entry, n):
    return {"root": n - 1} if COLLECTIVES[entry.collective].rooted else {}


def shares(entry):
    return entry.collective in ("reduce_scatter", "scatter", "all_to_all")


def on_cpu(n, parts, entries):
    """Return the results of all algorithms on the CPU, by rank."""

    def rank(comm):
        return [
            getattr(comm, e.collective)(
                parts[shares(e)][comm.rank].copy(), algorithm=e, **options_of(e, n)
            )
            for e in entries
        ]

    return run_threads(n, rank, config=Config(timeout_s=30, heap_bytes=1 << 28), timeout=60)


def is_same(got, want):
    return want is None if got is None else want is not None and same_bits(got.get(), want)


def check(writer, cupy, n, dtype, entries, block):
    """Compare all algorithms; a row for each."""
    parts = [data(n, (count,), dtype, seed=n) for count in (block, block // 7 * n)]
    wanted = on_cpu(n, parts, entries)
    with pycoll.virtual_ranks(n) as ranks:
        for i, entry in enumerate(entries):
            facts = {"n": n, "dtype": dtype.name, "algorithm": f"{entry.collective}/{entry.name}"}
            facts["count"] = parts[shares(entry)][0].size
            xs = [to_device(cupy, x) for x in parts[shares(entry)]]
            want = [w[i] for w in wanted]

            def bind(xs=xs, want=want, entry=entry):
                outs = [None if w is None else nonsense(cupy, w) for w in want]
                options = options_of(entry, n)
                return ranks.bind(entry.collective, xs, out=outs, algorithm=entry, **options)

            for method in methods_of(ranks, bind()):
                launch = bind()
                facts["kernel"] = ranks.info(launch, method).kernel.decode()
                try:
                    got = launch(5, method=method)
                    ranks.synchronize(10)
                    wrong = [r for r in range(n) if not is_same(got[r], want[r])]
                    writer.row("bits", not wrong, wrong_ranks=wrong, **facts)
                except pycoll.CollError as error:
                    writer.row("bits", False, error=str(error), **facts)
                    ranks.reset()


def ragged(writer, cupy, n):
    """Compare the v-variants with NumPy, with sums that are exact in any order; a row for each."""
    rows = [1 + 997 * rank % 5003 for rank in range(n)]
    matrix = np.arange(n * n).reshape(n, n) * 37 % 211
    ends = np.cumsum(rows)
    parts = [np.full((k, 3), rank, np.float32) for rank, k in enumerate(rows)]
    whole = [np.arange(3 * ends[-1], dtype=np.float32).reshape(-1, 3) % 1021] * n
    sent = [np.repeat(np.arange(n) + 100 * r, matrix[r]).astype(np.int32) for r in range(n)]
    starts = np.cumsum(matrix, axis=1) - matrix
    moved = [
        np.concatenate([sent[s][starts[s, d] : starts[s, d] + matrix[s, d]] for s in range(n)])
        for d in range(n)
    ]
    calls = {
        "all_gather_v": (parts, (), [np.concatenate(parts)] * n),
        "reduce_scatter_v": (
            whole,
            (rows,),
            [whole[0][e - k : e] * n for e, k in zip(ends, rows, strict=True)],
        ),
        "all_to_all_v": (sent, (matrix,), moved),
    }
    with pycoll.virtual_ranks(n) as ranks:
        for name, (xs, counts, wanted) in calls.items():
            try:
                got = getattr(ranks, name)([cupy.asarray(x) for x in xs], *counts, timeout=5)
                ranks.synchronize(10)
                good = all(same_bits(x.get(), want) for x, want in zip(got, wanted, strict=True))
                writer.row("bits", good, n=n, dtype=xs[0].dtype.name, algorithm=name)
            except pycoll.CollError as error:
                writer.row("bits", False, n=n, algorithm=name, error=str(error))
                ranks.reset()


def sent(writer, cupy, n):
    """Compare messages of every rank to the next one, in one launch; a row for each size."""
    dsts = [(rank + 1) % n for rank in range(n)]
    with pycoll.virtual_ranks(n) as ranks:
        for count in (*SMALL, LARGE):
            xs = [cupy.arange(count, dtype=cupy.int32) % 99_991 + rank for rank in range(n)]
            facts = {"n": n, "dtype": "int32", "algorithm": "sendrecv", "count": count}
            try:
                got = ranks.sendrecv(xs, dsts, timeout=5)
                ranks.synchronize(10)
                good = all(bool((got[d] == x).all()) for d, x in zip(dsts, xs, strict=True))
                writer.row("bits", good, **facts)
            except pycoll.CollError as error:
                writer.row("bits", False, error=str(error), **facts)
                ranks.reset()


def entries_of(n):
    return [a for a in ALGORITHMS if hasattr(VirtualRanks, a.collective) and a.worlds(n)]


def float8(writer, cupy):
    """Floats of 8 bits: every algorithm, and a vector that gives every rank many blocks."""
    kinds = [dtype for dtype in dtypes() if dtype.itemsize == 1]
    if not kinds:
        writer.row("bits", False, dtype="float8", error="ml_dtypes is not installed")
    for dtype in kinds:
        for n in WORLDS:
            check(writer, cupy, n, dtype, entries_of(n), BLOCK)
        large = [e for e in entries_of(WORLDS[-1]) if e.collective == "all_reduce"]
        check(writer, cupy, WORLDS[-1], dtype, large, LARGE)


def packets(writer, cupy):
    """Calls that go in packets, and messages of virtual ranks."""
    for n in WORLDS:
        names = ("one_shot", "two_shot_push", "direct", "push_pull")
        small = [e for e in entries_of(n) if e.name.startswith(names)]
        copies = [e for e in small if not COLLECTIVES[e.collective].reduces]
        for entries in (copies, [e for e in small if e not in copies]):
            for block in SMALL:
                check(writer, cupy, n, dtypes()[1], entries, block)
        sent(writer, cupy, n)


def everything(writer, cupy, few):
    for n in WORLDS[:1] if few else WORLDS:
        for dtype in [d for d in dtypes() if d.itemsize > 1][: 1 if few else None]:
            check(writer, cupy, n, dtype, entries_of(n), BLOCK)
        ragged(writer, cupy, n)
    if not few:
        large = [e for e in entries_of(8) if e.collective == "all_reduce"]
        check(writer, cupy, 8, np.dtype(np.float32), large, LARGE)


def main(*asked):
    writer, cupy = open_stage()
    for name, part in (("--float8", float8), ("--packets", packets)):
        if name in asked:
            return part(writer, cupy)
    everything(writer, cupy, "--few" in asked)


if __name__ == "__main__":
    main(*sys.argv[1:])
