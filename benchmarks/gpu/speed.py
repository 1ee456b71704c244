"""Time on the device of collectives of virtual ranks, beside what the memory could do.

Times are those of launches inside a CUDA graph, so the host plays no part. A bound is the traffic
that an algorithm needs by itself, in bytes read and written, at 4.3 TB/s (a copy on one H200).
"""

import functools
import time

import numpy as np
from common import COPY_BYTES_PER_S, MIB, open_stage, seconds_of

import pycoll
from pycoll.cuda.library import library

WORLDS = (2, 4, 8)
# Bytes read and written by all ranks, in multiples of the vector.
TRAFFIC = {
    "two_shot_push": lambda n: 2 * n,
    "ring": lambda n: 5 * (n - 1),
    "halving_doubling": lambda n: 5 * (n - 1),
    "one_shot": lambda n: n * (n + 1),
}
# Least share of the bound, and the vector in MiB from which it is asked for. At 64 MiB, what one
# step of the ring or of halving-doubling touches about fits the L2 cache (60 MB).
BARS = {"two_shot_push": (0.85, 64), "ring": (0.80, 256), "halving_doubling": (0.80, 256)}
SMALL_BYTES = 8 << 10


def copies(writer, cupy):
    """Measure what the memory does: a copy, and what CuPy needs for the same result."""
    for n, size in ((2, 256 * MIB), (8, 256 * MIB), (8, 64 * MIB)):
        x = cupy.ones((n, size // 4), cupy.float32)
        out = cupy.empty_like(x)

        def copy(stream, x=x, out=out):
            cupy.cuda.runtime.memcpyAsync(out.data.ptr, x.data.ptr, x.nbytes, 3, stream.ptr)

        spent = seconds_of(cupy, copy, 5)
        writer.row(
            "cudaMemcpyAsync", n=n, nbytes=size, seconds=spent, tb_s=2 * x.nbytes / spent / 1e12
        )
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        for _ in range(2):  # the second time counts: the first one compiles
            start.record()
            cupy.copyto(out, x.sum(axis=0))  # a sum, and its broadcast
            end.record()
            end.synchronize()
        spent = cupy.cuda.get_elapsed_time(start, end) * 1e-3
        writer.row("cupy sum", n=n, nbytes=size, seconds=spent, share=_share(2 * x.nbytes, spent))


def _share(nbytes, seconds):
    return nbytes / COPY_BYTES_PER_S / seconds


def bar_of(name, size):
    """Return the share that an algorithm has to reach with vectors of that size, None for none."""
    bar, least = BARS.get(name, (None, 0))
    return bar if size >= least * MIB else None


def large(writer, cupy, n, size, name):
    """Measure one algorithm on large vectors against its own traffic, and against the least."""
    with pycoll.virtual_ranks(n) as ranks:
        x = cupy.ones((n, size // 4), cupy.float32)
        out = cupy.empty_like(x)
        spent = seconds_of(
            cupy,
            lambda stream: ranks.all_reduce(x, out=out, algorithm=name, stream=stream, timeout=5),
            5,
        )
        ranks.check()
        right = bool((out == np.float32(n)).all())
        launch = ranks.bind("all_reduce", x, out=out, algorithm=name)
        info = ranks.info(launch)
    own = _share(TRAFFIC[name](n) * size, spent)
    bar = bar_of(name, size)
    writer.row(
        "all_reduce",
        (right and own >= bar) if bar else (None if right else False),
        n=n,
        nbytes=size,
        algorithm=name,
        seconds=spent,
        of_own_traffic=own,
        of_least_traffic=_share(2 * n * size, spent),
        bar=bar,
        right=right,
        kernel=info.kernel.decode(),
        blocks=info.blocks,
        threads=info.threads,
        registers=info.registers,
        spilled=info.local_bytes,
    )


def small(writer, cupy, n):
    """Measure 8 KiB beside an empty cooperative launch of as many blocks."""
    with pycoll.virtual_ranks(n) as ranks:
        x = cupy.ones((n, SMALL_BYTES // 4), cupy.float32)
        out = cupy.empty_like(x)
        call = functools.partial(ranks.all_reduce, x, out=out, timeout=5)
        spent = seconds_of(cupy, lambda stream: call(stream=stream), 50)
        ranks.check()
        info = ranks.info(ranks.bind("all_reduce", x, out=out))
        blocks = n * info.blocks

        def empty(stream):
            library().call("launch_empty", blocks, info.threads, stream.ptr)

        floor = seconds_of(cupy, empty, 50)
        start = time.perf_counter()
        for _ in range(200):
            call()
        host = (time.perf_counter() - start) / 200
        ranks.synchronize()
    bar = 2 * floor + 4e-6
    facts = {"n": n, "nbytes": SMALL_BYTES, "seconds": spent, "empty_seconds": floor, "bar": bar}
    facts |= {"host_seconds": host, "kernel": info.kernel.decode(), "blocks": info.blocks}
    writer.row("small all_reduce", spent <= bar if n == 8 else None, **facts)


def main():
    writer, cupy = open_stage()
    copies(writer, cupy)
    for n in WORLDS:
        small(writer, cupy, n)
        for size in (64 * MIB, 256 * MIB, 1 * MIB):
            for name in TRAFFIC:
                if name != "one_shot" or size == MIB:
                    large(writer, cupy, n, size, name)


if __name__ == "__main__":
    main()
