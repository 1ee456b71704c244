"""What stages share: their writer, the device, data, time on a stream."""

import faulthandler
import os
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from rows import Writer

from pycoll.cuda import missing
from pycoll.cuda.device.library import BEST, DIRECT, INTERPRET, LOW_LATENCY

MIB = 1 << 20


def open_stage():
    """Return the writer of this stage and CuPy; end the process with status 77 without a device."""
    # A stage that hangs gets this signal when its time is over: the log then has where it was.
    faulthandler.register(signal.SIGTERM, sys.__stderr__, all_threads=True, chain=True)
    writer = Writer(
        os.environ.get("PYCOLL_GPU_ROWS", os.devnull), os.environ.get("PYCOLL_GPU_STAGE", "?")
    )
    lacks = [line for line in missing() if not line.startswith("NCCL")]
    if lacks:
        skip(writer, lacks[0])
    import cupy

    return writer, cupy


def skip(writer, reason):
    """End the process because its stage cannot run here."""
    writer.row("skipped", None, reason=reason)
    print(f"skipped: {reason}", file=sys.stderr)
    raise SystemExit(77)


def row_of_all(comm, writer, name, good, **facts):
    """Write one row of all ranks, which is right if it is on each of them."""
    if good is not None:
        good = bool(comm.all_reduce(np.array([good]), "and")[0])
    if comm.rank == 0:
        writer.row(name, good, n=comm.world_size, **facts)


def dtypes():
    """Return element types, those of ml_dtypes among them if NumPy can have them here."""
    try:
        import ml_dtypes
    except ImportError:
        return [np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int32)]
    others = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    return [np.dtype(kind) for kind in (np.float32, np.float16, *others)]


def wide_floats():
    """Return those floats of `dtypes` that have more than 8 bits."""
    return [dtype for dtype in dtypes() if dtype.kind != "i" and dtype.itemsize > 1]


def data(n, shape, dtype, seed=0):
    """Return one array per rank, with values whose sums need rounding."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, *shape)) * np.exp2(rng.integers(-6, 6, (n, *shape)))
    return list((values * 64 if dtype.kind == "i" else values).astype(dtype))


def to_device(cupy, x):
    """Copy an array to the device, also of types of ml_dtypes, which CuPy may not copy."""
    if x.dtype.isbuiltin == 1:
        return cupy.asarray(x)
    return cupy.asarray(x.view(f"u{x.dtype.itemsize}")).view(x.dtype)


def ramps(cupy, n, count):
    """Return rows of small integers in float32 on the device, and their sum, exact in any order.

    Neighbours differ, and so do the ranks at one place: what is misplaced shows.
    """
    x = cupy.empty((n, count), cupy.float32)
    for rank in range(n):
        x[rank] = (cupy.arange(count, dtype=cupy.int32) + 37 * rank) % 1021
    return x, x.sum(axis=0)


def filled(cupy, count, dtype, value):
    """Return an array on the device that holds one value, also of types that CuPy cannot fill."""
    bits = np.array(value, dtype).view(f"u{dtype.itemsize}")
    return cupy.full(count, int(bits), bits.dtype).view(dtype)


def nonsense(cupy, like):
    """Return an array for a result on the device, of bytes that nothing leaves behind by chance."""
    return to_device(
        cupy, np.full(like.nbytes, 0xFF, np.uint8).view(like.dtype).reshape(like.shape)
    )


def same_bits(got, want):
    """Whether two arrays have the same bytes."""
    got, want = np.asarray(got), np.asarray(want)
    return got.shape == want.shape and got.tobytes() == want.tobytes()


def graph_of(cupy, body, count):
    """Capture ``count`` runs of a function into a CUDA graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Stream.null.synchronize()  # arrays were made there
    with stream:
        body(stream)  # once outside: makes plans, loads kernels
        stream.synchronize()
        stream.begin_capture()
        for _ in range(count):
            body(stream)
        return stream.end_capture(), stream


def methods_of(ranks, launch):
    """Return the ways to run a prepared call that are to be tested: both where packets are one."""
    kernel = ranks.info(launch).kernel.decode()
    other = INTERPRET if kernel.endswith(" move") else DIRECT  # copies have no kernel of their own
    return (LOW_LATENCY, other) if kernel.startswith("low_latency") else (BEST,)


def copy_speed(writer, cupy, n, nbytes):
    """Measure a copy of n vectors; return the bytes that it reads and writes in a second.

    On a stream: inside a graph the driver copies more than 256 MiB at four fifths of the speed.
    """
    x = cupy.ones((n, nbytes // 4), cupy.float32)
    out = cupy.empty_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Stream.null.synchronize()

    def copies():
        for _ in range(5):
            cupy.cuda.runtime.memcpyAsync(out.data.ptr, x.data.ptr, x.nbytes, 3, stream.ptr)

    spent = median_between_events(cupy, stream, copies) / 5
    speed = 2 * x.nbytes / spent
    writer.row("cudaMemcpyAsync", n=n, nbytes=nbytes, seconds=spent, tb_s=speed / 1e12)
    return speed


def seconds_of(cupy, body, count, repeats=7):
    """Return the median time on the device of one run of a function, by graphs of ``count``."""
    graph, stream = graph_of(cupy, body, count)
    launch = partial(graph.launch, stream)
    return median_between_events(cupy, stream, launch, repeats) / count


def median_between_events(cupy, stream, work, repeats=7):
    """Return the median time on the device of what a function puts on a stream, in seconds."""
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for _ in range(repeats + 2):
        work()  # keeps the device busy while the host puts what counts behind it
        first.record(stream)
        work()
        last.record(stream)
        last.synchronize()
        times.append(cupy.cuda.get_elapsed_time(first, last) * 1e-3)
    return float(np.median(times[2:]))
