"""all_reduce + residual + RMSNorm in one launch: the bits of the CPU, then time.

Times are those of launches inside a CUDA graph. Beside them stands what the bytes that a way needs
by itself would take at the speed of a copy, and all_reduce with CuPy kernels behind it.
"""

import numpy as np
from common import (
    MIB,
    copy_speed,
    data,
    graph_of,
    nonsense,
    open_stage,
    same_bits,
    seconds_of,
    to_device,
    wide_floats,
)

import pycoll
from pycoll.config import Config
from pycoll.testing import run_threads

WORLDS = (2, 4, 8)
# Rows, elements of a row: whole vectors or not, rows that a block holds in registers or not.
SHAPES = ((1, 4096), (67, 7168), (33, 5003), (9, 20_000))
HIDDEN = 8192
TOKENS = (1, 8, 64, 512, 4096)
EPS = 1e-5
WAYS = ("one_shot", "two_shot_push")


def on_cpu(xs, weight, residual, order):
    """Return what a communicator makes of rows on the CPU."""

    def rank(comm):
        return comm.all_reduce_rms_norm(xs[comm.rank], weight, residual, EPS, order=order)

    config = Config(timeout_s=30, heap_bytes=1 << 28)
    return run_threads(len(xs), rank, config=config, timeout=60)[0]


def check(writer, cupy, n, dtype, rows, hidden):
    """Compare both ways with the CPU, with a residual and without, in both orders; a row each."""
    xs = data(n, (rows, hidden), dtype, seed=hidden)
    weight, residual = data(1, (hidden,), dtype)[0], data(1, (rows, hidden), dtype, seed=1)[0]
    for order, more in (("tree", residual), ("rank", None)):
        want = on_cpu(xs, weight, more, order)
        want = (want,) if more is None else want
        for way in WAYS:
            with pycoll.virtual_ranks(n) as ranks:
                given = [to_device(cupy, x) for x in xs], to_device(cupy, weight)
                added = None if more is None else [to_device(cupy, more) for _ in xs]
                outs = [[nonsense(cupy, w) for _ in xs] for w in want]
                kept = outs[1] if more is not None else None
                facts = {"n": n, "dtype": dtype.name, "rows": rows, "hidden": hidden, "way": way}
                facts |= {"order": order, "residual": more is not None}
                ranks.all_reduce_rms_norm(
                    *given, added, EPS, out=outs[0], residual_out=kept, order=order, algorithm=way,
                    timeout=5,
                )  # fmt: skip
                ranks.synchronize(10)
                good = [
                    all(same_bits(got.get(), w) for got in out)
                    for out, w in zip(outs, want, strict=True)
                ]
                writer.row("norm bits", all(good), **facts)


def replayed(writer, cupy, n):
    """Replay a graph in which the residual grows: every replay works on what is there by then."""
    with pycoll.virtual_ranks(n) as ranks:
        xs = [cupy.ones((4, 64), cupy.float32) for _ in range(n)]
        weight, outs = cupy.ones(64, cupy.float32), [cupy.zeros((4, 64), cupy.float32) for _ in xs]
        more = [cupy.zeros((4, 64), cupy.float32) for _ in xs]

        def body(stream):
            ranks.all_reduce_rms_norm(
                xs, weight, more, 0, out=outs, residual_out=more, stream=stream, timeout=5
            )

        graph, stream = graph_of(cupy, body, 2)
        for _ in range(5):
            graph.launch(stream)
        stream.synchronize()
        ranks.check()
        good = all(bool((h == 11 * n).all()) for h in more)
        good &= all(bool((y == 1).all()) for y in outs)
    writer.row("graph", good, n=n, algorithm="all_reduce_rms_norm", replays=5)


def unfused(cupy, ranks, x, weight, more, out, kept):
    """Return a function that does the same by all_reduce and three kernels of CuPy."""
    add = cupy.ElementwiseKernel("T s, T r", "T h", "h = (float)s + (float)r", "residual_add")
    squares = cupy.ReductionKernel(
        "T h", "float32 total", "(float)h * (float)h", "a + b", "total = a", "0", "row_squares"
    )
    scale = cupy.ElementwiseKernel(
        "T h, float32 total, T w, float32 hidden, float32 eps",
        "T y",
        "y = (float)h / sqrtf(total / hidden + eps) * (float)w",
        "row_scale",
    )
    total = cupy.empty(x.shape[:-1], cupy.float32)

    def body(stream):
        ranks.all_reduce(x, out=out, stream=stream, timeout=5)
        with stream:
            add(out, more, kept)
            squares(kept, total, axis=2)
            scale(kept, total[..., None], weight, x.shape[-1], EPS, out)

    return body


def traffic(way, n, nbytes):
    """Return the bytes that all ranks read and write, with vectors of `nbytes`."""
    reads = n * n + n if way == "one_shot" else n + 1
    return (reads + 2 * n) * nbytes


def measure(writer, cupy, n, tokens, copied):
    """Measure both ways, and without fusion; `copied` is what a copy moves, in bytes/s."""
    rng = np.random.default_rng(tokens)
    shape, half = (n, tokens, HIDDEN), np.dtype(np.float16)
    row = cupy.asarray(rng.standard_normal((n, 1, HIDDEN)).astype(half))
    x, more = (cupy.empty(shape, half) for _ in range(2))
    x[...], more[...] = row, row[:1]
    weight = cupy.asarray(rng.standard_normal(HIDDEN).astype(half))
    out, kept = (cupy.empty(shape, half) for _ in range(2))
    count, nbytes = (50 if tokens <= 64 else 5), tokens * HIDDEN * half.itemsize
    facts = {"n": n, "tokens": tokens, "hidden": HIDDEN, "nbytes": nbytes}
    with pycoll.virtual_ranks(n) as ranks:
        beside = seconds_of(cupy, unfused(cupy, ranks, x, weight, more, out, kept), count)
        writer.row("norm", None, way="unfused", seconds=beside, share=None, **facts)
        for way in WAYS:
            if way == "one_shot" and nbytes > MIB:
                continue

            def body(stream, way=way):
                ranks.all_reduce_rms_norm(
                    x, weight, more, EPS, out=out, residual_out=kept, algorithm=way,
                    stream=stream, timeout=5,
                )  # fmt: skip

            spent = seconds_of(cupy, body, count)
            ranks.check()
            share = traffic(way, n, nbytes) / copied / spent
            facts["faster"] = beside / spent
            writer.row("norm", None, way=way, seconds=spent, share=share, **facts)


def main():
    writer, cupy = open_stage()
    for n in WORLDS:
        for dtype in wide_floats():
            for rows, hidden in SHAPES:
                check(writer, cupy, n, dtype, rows, hidden)
        replayed(writer, cupy, n)
    copied = copy_speed(writer, cupy, 8, 64 * MIB)
    for n in WORLDS:
        for tokens in TOKENS:
            measure(writer, cupy, n, tokens, copied)


if __name__ == "__main__":
    main()
