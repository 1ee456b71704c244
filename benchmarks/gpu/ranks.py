"""Processes that share the device: over memory mapped by CUDA IPC, or over NCCL.

Started by ``pycoll run``. Every result is compared with that of the same algorithm on the CPU. On
one device kernels of several processes take turns, so times say nothing and none is taken but for
NCCL's own all-reduce, which is a baseline.
"""

import sys
import time

import numpy as np
from common import MIB, open_stage, same_bits, skip

import pycoll
from pycoll.cuda.nccl_bindings import find_binding

SIZES = (17, 5003, 300_000)
ALGORITHMS = ("one_shot", "two_shot_push", "ring", "halving_doubling", "circulant")


def bits(comm, cupy, writer):
    """Compare algorithms, sizes and kinds of memory with the CPU."""
    for name in ALGORITHMS:
        for count in SIZES:
            for kind in ("symmetric", "pool"):
                x = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
                want = comm.all_reduce(x, algorithm=name)
                on_device = cupy.asarray(x)
                if kind == "symmetric":
                    on_device = comm.empty(count, np.float32, device="cuda")
                    on_device[...] = cupy.asarray(x)
                work = comm.all_reduce(on_device, algorithm=name, async_op=True, timeout=20)
                got = work.synchronize(25)
                good = bool(comm.all_reduce(np.array([same_bits(got.get(), want)]), "and")[0])
                if comm.rank == 0:
                    facts = {"n": comm.world_size, "algorithm": name, "count": count}
                    writer.row("ranks", good, memory=kind, **facts)


def native(comm, cupy, writer):
    """Check and time NCCL's own all-reduce, and ours over its messages."""
    for size in (8 << 10, 64 * MIB):
        x = cupy.ones(size // 4, cupy.float32)
        out = cupy.empty_like(x)
        for name in ("native", "ring", "two_shot_pull"):
            times = []
            for _ in range(6):
                comm.barrier()
                start = time.perf_counter()
                comm.all_reduce(x, out=out, algorithm=name, async_op=True).synchronize(30)
                times.append(time.perf_counter() - start)
            good = bool((out == np.float32(comm.world_size)).all())
            if comm.rank == 0:
                facts = {"n": comm.world_size, "algorithm": name, "nbytes": size}
                writer.row("nccl all_reduce", good, seconds=float(np.median(times[1:])), **facts)


def main(transport):
    writer, cupy = open_stage()
    if transport == "nccl":
        try:
            find_binding()
        except pycoll.CudaUnavailable as error:
            skip(writer, str(error).splitlines()[0])
    with pycoll.init(device_transport=transport, device_heap_bytes=64 * MIB, timeout=30) as comm:
        bits(comm, cupy, writer)
        if transport == "nccl":
            native(comm, cupy, writer)


if __name__ == "__main__":
    main(sys.argv[1])
