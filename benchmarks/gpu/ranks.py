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
from common import MIB, nonsense, open_stage, row_of_all, same_bits, skip

import pycoll
from pycoll.cuda.device.library import VMM, library
from pycoll.cuda.transports.base import wait_for
from pycoll.cuda.transports.nccl_bindings import find_binding

SIZES = (17, 5003, 300_000)
CALLS = 5
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


def native(comm, cupy, writer):
    """Check NCCL's own all-reduce and ours over its messages; time them unless by sockets."""
    by_sockets = "NCCL_HOSTID" in os.environ  # set before NCCL 2.30 where ranks share a device
    for size in (8 << 10, 64 * MIB):
        x = cupy.ones(size // 4, cupy.float32)
        out = cupy.empty_like(x)
        for name in ("native", "ring", "two_shot_pull"):
            out.fill(0)
            if by_sockets:
                comm.all_reduce(x, out=out, algorithm=name, async_op=True).synchronize(30)
            spent = None if by_sockets else median_seconds(comm, cupy, x, out, name)
            good = bool((out == np.float32(comm.world_size)).all())
            facts = {"algorithm": name, "nbytes": size, "seconds": spent, "calls": CALLS}
            row_of_all(comm, writer, "nccl all_reduce", good, **facts)


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


def main(transport):
    writer, cupy = open_stage()
    if transport == "nccl":
        try:
            find_binding()
        except pycoll.CudaUnavailable as error:
            skip(writer, str(error).splitlines()[0])
    with pycoll.init(device_transport=transport, device_heap_bytes=64 * MIB, timeout=30) as comm:
        first_calls(comm, cupy, writer, transport)
        bits(comm, cupy, writer)
        if transport == "cuda":
            heap_memory(comm, writer)
        if transport == "nccl":
            native(comm, cupy, writer)


if __name__ == "__main__":
    main(sys.argv[1])
