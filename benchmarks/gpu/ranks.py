"""Processes that share the device: over memory that they map, or over NCCL.

Started by ``pycoll run``. Every result is compared with that of the same algorithm on the CPU. On
one device kernels of several processes take turns, so times tell whether a call comes to an end at
once or only just before it gives up, and no more; but for messages of NCCL, which are a baseline;
and where those go through sockets, not even for them.
"""

import os
import sys
import time

import numpy as np
from common import MIB, nonsense, open_stage, row_of_all, same_bits, seconds_of, skip

import pycoll
from pycoll.cuda.device.library import VMM, library
from pycoll.cuda.transports.base import wait_for
from pycoll.cuda.transports.nccl_bindings import find_binding

SIZES = (17, 5003, 300_000)
CALLS = 5
MESSAGES = (68, 20_012, (4 << 20) + 4, 64 << 20)  # bytes
HEAP_MIB = 256
TIMED = {
    "cuda": ("one_shot", "two_shot_push", "ring"),
    "nccl": ("native", "ring", "two_shot_pull"),
}
ALGORITHMS = ("one_shot", "two_shot_push", "ring", "halving_doubling", "circulant")


def bits(comm, cupy, writer):
    """Compare algorithms, sizes and kinds of memory with the CPU."""
    for name in ALGORITHMS:
        for count in SIZES:
            for kind in ("symmetric", "pool"):
                x = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
                want = comm.all_reduce(x, algorithm=name)
                on_device, out = cupy.asarray(x), nonsense(cupy, x)
                if kind == "symmetric":  # both: only then is nothing staged, but in one_shot
                    on_device, out = (comm.empty(count, np.float32, device="cuda") for _ in "xy")
                    on_device[...], out[...] = cupy.asarray(x), nonsense(cupy, x)
                start = time.perf_counter()
                options = {"algorithm": name, "async_op": True, "timeout": 20}
                work = comm.all_reduce(on_device, out=out, **options)
                got = work.synchronize(25)
                spent = round(time.perf_counter() - start, 6)
                facts = {"algorithm": name, "count": count, "memory": kind, "seconds": spent}
                row_of_all(comm, writer, "ranks", same_bits(got.get(), want), **facts)


def small(comm, cupy, writer):
    """Compare copies in packets with the CPU: arrays of a pool, which peers do not reach."""
    n, rank = comm.world_size, comm.rank
    for count in (1, 1001, 8000):
        x = np.random.default_rng(rank).standard_normal(n * count).astype(np.float32)
        for name, given in (("all_gather", x[:count]), ("all_to_all", x), ("broadcast", x)):
            root = {"root": 1} if name == "broadcast" else {}
            want = getattr(comm, name)(given.copy(), **root)
            start = time.perf_counter()
            work = getattr(comm, name)(cupy.asarray(given), async_op=True, timeout=20, **root)
            got = work.synchronize(25).get()
            spent = round(time.perf_counter() - start, 6)
            facts = {"algorithm": f"{name} in packets", "count": count, "seconds": spent}
            row_of_all(comm, writer, "process moves", same_bits(got, want), **facts)


def moves(comm, cupy, writer):
    """Compare calls that copy engines make with the CPU: `main` asks for them from 64 KiB on."""
    for count in SIZES[1:]:
        x = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
        want = {"all_gather": comm.all_gather(x), "broadcast": comm.broadcast(x.copy(), 1)}
        for name, result in want.items():
            on_device = comm.empty(x.shape, x.dtype, device="cuda")
            out = comm.empty(result.shape, x.dtype, device="cuda")
            on_device[...], out[...] = cupy.asarray(x), nonsense(cupy, result)
            root = {"root": 1} if name == "broadcast" else {}
            start = time.perf_counter()
            work = getattr(comm, name)(on_device, out=out, async_op=True, timeout=20, **root)
            work.synchronize(25)
            spent = round(time.perf_counter() - start, 6)
            facts = {"algorithm": name, "count": count, "seconds": spent}
            row_of_all(comm, writer, "process moves", same_bits(out.get(), result), **facts)


def ragged(comm, cupy, writer):
    """Compare the v-variants with the CPU; their sizes are exchanged on the host."""
    n, rank = comm.world_size, comm.rank
    rows, counts = 20_011 * (rank + 1), [1000 + 7 * k for k in range(n)]
    x = np.full((rows, 3), rank, np.float32)
    y = np.arange(3 * sum(counts), dtype=np.float32).reshape(-1, 3) % 1021 + rank
    for name, z, more in (
        ("all_gather_v", x, ()),
        ("reduce_scatter_v", y, (counts,)),
        ("all_to_all_v", y, (counts,)),
    ):
        start = time.perf_counter()
        got = getattr(comm, name)(cupy.asarray(z), *more, timeout=20).get()
        spent = round(time.perf_counter() - start, 6)
        want = getattr(comm, name)(z, *more)
        facts = {"algorithm": name, "count": z.size, "seconds": spent}
        row_of_all(comm, writer, "process moves", same_bits(got, want), **facts)


def messages(comm, cupy, writer):
    """Send to the next rank, receive from the one before, and time it.

    From the heap a receiver copies what is large from where it lies; all else goes through slots.
    """
    n, rank = comm.world_size, comm.rank
    for kind in ("symmetric", "pool"):  # large ones of the second need launches side by side
        for nbytes in MESSAGES:
            x, seconds = np.arange(nbytes // 4, dtype=np.int32) % 99_991 + rank, []
            want = x - rank + (rank - 1) % n
            on_device, out = cupy.asarray(x), nonsense(cupy, x)
            if kind == "symmetric":
                on_device = comm.empty(x.shape, x.dtype, device="cuda")
                on_device[...] = cupy.asarray(x)
            for _ in range(CALLS):
                comm.barrier()
                start = time.perf_counter()
                comm.sendrecv(on_device, (rank + 1) % n, out, (rank - 1) % n, timeout=20)
                cupy.cuda.get_current_stream().synchronize()
                seconds.append(time.perf_counter() - start)
            spent = float(np.median(seconds))
            facts = {"nbytes": nbytes, "memory": kind, "seconds": spent, "mps": under_mps()}
            facts["gb_s"] = nbytes / spent / 1e9
            row_of_all(comm, writer, "process messages", same_bits(out.get(), want), **facts)


def beside(comm, cupy, writer):
    """Run a collective while a message waits for room: launches of one process run side by side."""
    n, rank, nbytes = comm.world_size, comm.rank, 8 * MIB  # more than all slots hold
    x, y = (cupy.full(nbytes // 4, value, cupy.int32) for value in (rank, -1))
    facts = {"nbytes": nbytes, "memory": "beside a call", "mps": under_mps()}
    comm.barrier()
    start = time.perf_counter()
    try:
        sent = comm.isend(x, (rank + 1) % n)
        total = comm.all_reduce(cupy.ones(1000, cupy.float32), async_op=True, timeout=5)
        total = total.synchronize(10)
        comm.recv(y, (rank - 1) % n, timeout=5)
        sent.synchronize(10)
        good = bool((total == n).all()) and bool((y == (rank - 1) % n).all())
        spent = time.perf_counter() - start
        facts |= {"seconds": spent, "gb_s": nbytes / spent / 1e9}
        row_of_all(comm, writer, "process messages", good, **facts)
    except pycoll.CollError as error:
        facts |= {"n": n, "seconds": None, "error": str(error)[:500]}
        writer.row("process messages", False, **facts)


def heap_memory(comm, writer):
    """Check how heaps are mapped: as virtual memory where the device has it and nobody forbids it.

    In one process all memory can be opened; what a peer is refused shows only here.
    """
    heap = comm._session.device.transport.memory
    wanted = comm._session.config.device_memory == "auto"
    bits = library().support(heap.device)
    facts = {"virtual": heap.virtual, "support": bits}
    row_of_all(comm, writer, "heap memory", heap.virtual == (wanted and bool(bits & VMM)), **facts)


def first_calls(comm, cupy, writer, transport):
    """Time the first call, which opens the transport, and the next one."""
    x, seconds = cupy.ones(17, cupy.float32), []
    for _ in range(2):
        start = time.perf_counter()
        comm.all_reduce(x, async_op=True).synchronize(30)
        seconds.append(round(time.perf_counter() - start, 6))
    row_of_all(comm, writer, "first calls", None, transport=transport, seconds=seconds)


def times(comm, cupy, writer, transport):
    """Time calls of processes, NCCL's own beside ours, unless by sockets; check the results too.

    Without MPS the kernels of processes take turns on one device, so most of the time is waiting.
    """
    by_sockets = "NCCL_HOSTID" in os.environ  # set before NCCL 2.30 where ranks share a device
    nccl = transport == "nccl"  # its messages and our folds are not captured
    for size in (8 << 10, MIB, 64 * MIB):
        like = size // 4, cupy.float32
        x, out = (cupy.empty(*like) if nccl else comm.empty(*like, device="cuda") for _ in "xy")
        x.fill(1)
        for name in TIMED[transport]:
            out.fill(0)
            graph = name == "native" or not nccl
            if by_sockets:
                comm.all_reduce(x, out=out, algorithm=name, async_op=True).synchronize(30)
                spent = None
            elif graph:
                spent = seconds_in_graphs(comm, cupy, x, out, name)
            else:
                spent = median_seconds(comm, cupy, x, out, name)
            good = bool((out == np.float32(comm.world_size)).all())
            facts = {"algorithm": name, "nbytes": size, "seconds": spent, "calls": CALLS}
            facts |= {"transport": transport, "graph": graph, "mps": under_mps()}
            row_of_all(comm, writer, "process all_reduce", good, **facts)


def under_mps():
    """Whether kernels of several processes run at once: a server for that has been started."""
    return os.path.exists(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps") + "/control")


def seconds_in_graphs(comm, cupy, x, out, name):
    """Return the median time of a call in a CUDA graph that all ranks launch."""

    def body(stream):
        comm.all_reduce(x, out=out, algorithm=name, stream=stream)

    comm.barrier()
    return seconds_of(cupy, body, CALLS, repeats=5)


def median_seconds(comm, cupy, x, out, name):
    """Return the median time of a call on this rank's stream, taken over several in a row.

    The device is busy with one while the host agrees on the next, which it does for every call; a
    small call on the device takes no longer than that, and then the host's time is what is seen.
    """
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Stream.null.synchronize()  # the arrays were made there
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for _ in range(4):
        comm.barrier()
        first.record(stream)
        for _ in range(CALLS):
            comm.all_reduce(x, out=out, algorithm=name, stream=stream)
        last.record(stream)
        wait_for(last, 30.0, "NCCL")
        times.append(cupy.cuda.get_elapsed_time(first, last) * 1e-3 / CALLS)
    return float(np.median(times[1:]))


def main(transport, part=""):
    writer, cupy = open_stage()
    if transport == "nccl":
        try:
            find_binding()
        except pycoll.CudaUnavailable as error:
            skip(writer, str(error).splitlines()[0])
    os.environ.setdefault("PYCOLL_DEVICE_COPY_BYTES", "64K")
    with pycoll.init(
        device_transport=transport, device_heap_bytes=HEAP_MIB * MIB, timeout=30
    ) as comm:
        first_calls(comm, cupy, writer, transport)
        if part == "--messages":
            for check in (small, messages, beside):  # the last may fail, and what follows with it
                check(comm, cupy, writer)
            return
        bits(comm, cupy, writer)
        if transport == "cuda":
            heap_memory(comm, writer)
            moves(comm, cupy, writer)
            ragged(comm, cupy, writer)
        times(comm, cupy, writer, transport)


if __name__ == "__main__":
    main(*sys.argv[1:])
