"""Time on the device of collectives of virtual ranks, beside what the memory could do.

Times are those of launches inside a CUDA graph, so the host plays no part. A bound is the traffic
that an algorithm needs by itself, in bytes read and written, at the speed of the fastest copy.
"""

import functools
import time

import model
import numpy as np
from common import MIB, copy_speed, open_stage, ramps, seconds_of

import pycoll
from pycoll.cuda.device.library import DIRECT, LOW_LATENCY, library

WORLDS = (2, 4, 8)
# Least share of the bound, and the vector in MiB from which it is asked for.
BARS = {
    "two_shot_push": (0.85, 64),
    "two_shot_push_rank": (0.85, 64),
    "ring": (0.80, 64),
    "halving_doubling": (0.80, 64),
}
SMALL_BYTES = 8 << 10
# Where the low-latency protocol may be faster; its threads a block, as its limits are to be set.
PROTOCOL_BYTES = (8, 64, 512, 2 << 10, *(1 << bits for bits in range(12, 19)))
PROTOCOL_THREADS = (128, 256, 512)


def copies(writer, cupy):
    """Measure a copy, and what CuPy needs for the same result; return bytes/s of the fastest copy.

    Bytes are those read and those written.
    """
    found, sums = [], []
    for n, size in ((2, 256 * MIB), (8, 256 * MIB), (8, 64 * MIB)):
        found.append(copy_speed(writer, cupy, n, size))
        x = cupy.ones((n, size // 4), cupy.float32)
        out = cupy.empty_like(x)
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        for _ in range(2):  # the second time counts: the first one compiles
            start.record()
            cupy.copyto(out, x.sum(axis=0))  # a sum, and its broadcast
            end.record()
            end.synchronize()
        spent = cupy.cuda.get_elapsed_time(start, end) * 1e-3
        sums.append({"n": n, "nbytes": size, "seconds": spent})
    for facts in sums:
        moved = 2 * facts["n"] * facts["nbytes"]
        writer.row("cupy sum", **facts, share=moved / max(found) / facts["seconds"])
    return max(found)


def bar_of(name, size):
    """Return the share that an algorithm has to reach with vectors of that size, None for none."""
    bar, least = BARS.get(name, (None, 0))
    return bar if size >= least * MIB else None


def is_right(ranks, launch, out, total, **form):
    """Whether one more launch puts the sum where nothing of earlier ones is left."""
    out.fill(np.nan)
    launch(5, **form)
    ranks.synchronize(10)
    return bool((out == total).all())


def form_of(info):
    """Return the facts of a kernel and its default launch, ready for a row."""
    names = "max_blocks blocks threads registers".split()
    facts = {name: getattr(info, name) for name in names}
    return {"kernel": info.kernel.decode(), **facts, "spilled": info.local_bytes}


def narrow(writer, cupy, ranks, launch, out, total, spent):
    """Measure a launch of fewer threads a block beside the default one, which took `spent`."""
    n, count = out.shape
    facts = {"n": n, "nbytes": 4 * count, "threads": 256, "default_seconds": spent}
    seconds = seconds_of(cupy, lambda stream: launch(5, threads=256, stream=stream), 5)
    right = is_right(ranks, launch, out, total)
    writer.row("narrow blocks", None if right else False, seconds=seconds, **facts)


def large(writer, cupy, n, size, name, copied):
    """Measure one algorithm on large vectors against its own traffic, and against the least.

    `copied` is what a copy moves, in bytes/s.
    """
    with pycoll.virtual_ranks(n) as ranks:
        x, total = ramps(cupy, n, size // 4)
        out = cupy.empty_like(x)
        launch = ranks.bind("all_reduce", x, out=out, algorithm=name)
        spent = seconds_of(cupy, lambda stream: launch(5, stream=stream), 5)
        right = is_right(ranks, launch, out, total)
        info = ranks.info(launch)
        if name == "two_shot_push" and size == 256 * MIB:
            narrow(writer, cupy, ranks, launch, out, total, spent)
    own = model.TRAFFIC[name](n) * size / copied / spent
    bar = bar_of(name, size)
    writer.row(
        "all_reduce",
        (right and own >= bar) if bar else (None if right else False),
        n=n,
        nbytes=size,
        algorithm=name,
        seconds=spent,
        predicted=model.seconds(name, n, size, copied),
        of_own_traffic=own,
        of_least_traffic=2 * n * size / copied / spent,
        bar=bar,
        right=right,
        **form_of(info),
    )


def small(writer, cupy, n):
    """Measure 8 KiB beside an empty cooperative launch of as many blocks."""
    with pycoll.virtual_ranks(n) as ranks:
        x, total = ramps(cupy, n, SMALL_BYTES // 4)
        out = cupy.empty_like(x)
        call = functools.partial(ranks.all_reduce, x, out=out, timeout=5)
        spent = seconds_of(cupy, lambda stream: call(stream=stream), 50)
        ranks.check()
        launch = ranks.bind("all_reduce", x, out=out)
        right, info = is_right(ranks, launch, out, total), ranks.info(launch)
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
    facts |= {"host_seconds": host, "right": right, **form_of(info)}
    met = spent <= bar if n == 8 else None
    writer.row("small all_reduce", met if right else False, **facts)


def protocols(writer, cupy, n, size):
    """Measure packets of several forms beside the kernel that reads the arrays of peers."""
    with pycoll.virtual_ranks(n) as ranks:
        x, total = ramps(cupy, n, max(1, size // 4))
        out = cupy.empty_like(x)
        launch = ranks.bind("all_reduce", x, out=out)
        forms = [(DIRECT, 0), *((LOW_LATENCY, threads) for threads in PROTOCOL_THREADS)]
        for method, threads in forms:
            facts = {"n": n, "nbytes": size, "threads": threads}
            try:
                kernel = ranks.info(launch, method).kernel.decode()
            except pycoll.CollError:
                continue  # more than a slot holds
            form = {"method": method, "threads": threads}
            spent = seconds_of(cupy, functools.partial(put, launch, form), 20)
            right = is_right(ranks, launch, out, total, **form)
            good = None if right else False
            facts["predicted"] = model.packets_seconds(n, size)
            writer.row("protocol", good, kernel=kernel, seconds=spent, right=right, **facts)


def put(launch, form, stream):
    launch(5, stream=stream, **form)


def main():
    writer, cupy = open_stage()
    copied = copies(writer, cupy)
    for n in WORLDS:
        small(writer, cupy, n)
        for size in PROTOCOL_BYTES:
            protocols(writer, cupy, n, size)
        for size in (64 * MIB, 256 * MIB, 1 * MIB):
            for name in model.TRAFFIC:
                if name != "one_shot" or size == MIB:
                    large(writer, cupy, n, size, name, copied)


if __name__ == "__main__":
    main()
