"""What the ranks of benchmarks/overhead.py do; each measurement is a function of the communicator.

``pycoll run -n N benchmarks/overhead_ranks.py NAME FILE``
"""

import ctypes
import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

import pycoll
from pycoll.runtime.startup.bootstrap import adopt, make_memfd
from pycoll.schedule.ir import IN, OUT, algorithm, at, fold


def batches(comm, call, calls, runs):
    """Return seconds a call of each run of so many calls, on the slowest rank."""
    found = np.empty(runs)
    for i in range(runs):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found[i] = (time.perf_counter() - start) / calls
    return comm.all_reduce(found, "max")


def small_call(comm):
    """8 bytes in place, ordinary memory: microseconds a call."""
    x = np.zeros(2, np.float32)

    def call():
        comm.all_reduce(x, out=x)

    batches(comm, call, 1000, 3)
    found = batches(comm, call, 200, 201) * 1e6
    return {
        "median_us": np.median(found),
        "best_us": found.min(),
        "p99_us": np.percentile(found, 99),
    }


def crowded(comm):
    """64 KiB in place in symmetric memory, more ranks than cores: microseconds a call."""
    x = comm.empty(16 << 10, np.float32)
    x[:] = 0

    def call():
        comm.all_reduce(x, out=x)

    batches(comm, call, 50, 3)
    found = batches(comm, call, 50, 41) * 1e6
    return {
        "median_us": np.median(found),
        "best_us": found.min(),
        "p99_us": np.percentile(found, 99),
    }


def shared_map(comm, nbytes):
    """Return memory that all ranks map."""
    place = np.array([os.getpid(), -1])
    if comm.rank == 0:
        place[1] = make_memfd("limit")
        os.posix_fallocate(int(place[1]), 0, nbytes)
    comm.broadcast(place, out=place)
    fd = int(place[1]) if comm.rank == 0 else adopt(*place.tolist())
    comm.barrier()
    found = mmap.mmap(fd, nbytes)
    os.close(fd)
    return found


class Limit:
    """The plain C++ loop, in these processes; see native/limit_all_reduce.cpp."""

    def __init__(self, comm, library, count, slots):
        self._library = ctypes.CDLL(library)
        self._library.limit_header_bytes.restype = ctypes.c_size_t
        self._rank, self._count, self._slots, self._done = comm.rank, count, slots, 0
        self._stride = count * 4 + 320  # as in the memory of pycoll
        nbytes = self._library.limit_header_bytes() + 2 * slots * self._stride
        self._map = shared_map(comm, nbytes)
        self._memory = np.frombuffer(self._map, np.uint8)

    def __call__(self, calls):
        numbers = map(ctypes.c_size_t, (self._count, self._stride, self._slots, self._done, calls))
        pointer = ctypes.c_void_p(self._memory.ctypes.data)
        self._library.limit_all_reduce(pointer, self._rank, *numbers)
        self._done += calls


def against_limit(comm, library):
    """1 MiB of float32 in place in symmetric memory beside the plain loop, run by run in turn."""
    count, slots, calls = 1 << 18, 4, 80
    limit = Limit(comm, library, count, slots)
    pool = comm.empty((slots, count + 80), np.float32)
    pool[:] = 0
    memory = [row[:count] for row in pool]
    turn = iter(range(1 << 30))

    def ours():
        x = memory[next(turn) % slots]
        comm.all_reduce(x, out=x)

    batches(comm, ours, 2 * slots, 3), batches(comm, lambda: limit(2 * slots), 1, 3)
    mine, plain = [], []
    for _ in range(41):
        mine += list(batches(comm, ours, calls, 1))
        plain += list(batches(comm, lambda: limit(calls), 1, 1) / calls)
    ratios = np.array(plain) / np.array(mine)
    return {
        "pycoll_us": np.median(mine) * 1e6,
        "plain_us": np.median(plain) * 1e6,
        "speed": np.median(plain) / np.median(mine),
        "speed_quartiles": list(np.percentile(ratios, [25, 75])),
    }


def chain(lines):
    """An all-reduce of one rank with so many folds, all but the first of empty chunks."""

    @algorithm("all_reduce", f"chain{lines}", chunks=lines)
    def rounds(rank, n):
        """Copy chunk by chunk; made to time the interpreter."""
        for chunk in range(lines):
            yield fold(at(rank, IN, chunk), to=at(rank, OUT, chunk))

    return rounds


def step_cost(comm):
    """Nanoseconds for one more instruction: a plan of many empty folds against one of few."""
    x = comm.empty(1, np.float32)
    out = comm.empty(1, np.float32)
    x[:] = 1
    few, many = chain(64), chain(4096)

    def seconds(which):
        return batches(comm, lambda: comm.all_reduce(x, out=out, algorithm=which), 20, 101)

    seconds(few), seconds(many)
    found = (np.median(seconds(many)) - np.median(seconds(few))) / (4096 - 64)
    return {"ns": found * 1e9}


def waiting(comm):
    """Share of a core that a rank uses while it waits, from 10 ms after it began to."""
    samples = []

    def sample():
        time.sleep(0.010)
        start, busy = time.perf_counter(), time.process_time()
        time.sleep(1.0)
        samples.append((time.process_time() - busy) / (time.perf_counter() - start))

    comm.barrier()
    if comm.rank == 0:
        observer = threading.Thread(target=sample)
        observer.start()
        comm.barrier()
        observer.join()
    else:
        time.sleep(1.2)
        comm.barrier()
    return {"share": samples[0] if samples else None}


def overlap(comm):
    """Part of a 128 MiB all-reduce that hides behind work elsewhere, and behind work of a core."""
    x = comm.empty(32 << 20, np.float32)
    x[:] = 0

    def compute(seconds):
        end, y = time.perf_counter() + seconds, np.ones(4096)
        while time.perf_counter() < end:
            np.sqrt(y, out=y)

    def both(work, seconds):
        handle = comm.all_reduce(x, out=x, async_op=True)
        work(seconds)
        handle.wait()

    def apart(work, seconds):
        comm.all_reduce(x, out=x)
        work(seconds)

    def once(call, *args):
        return batches(comm, lambda: call(*args), 1, 1)[0]

    alone = float(np.median([once(apart, lambda seconds: None, 0.0) for _ in range(11)]))
    found = {"all_reduce_ms": alone * 1e3}
    for name, work in (("elsewhere", time.sleep), ("on_core", compute)):
        pairs = [(once(apart, work, alone), once(both, work, alone)) for _ in range(15)]
        found[name] = float(np.median([a - b for a, b in pairs])) / alone
    return found


MEASUREMENTS = (small_call, crowded, against_limit, step_cost, waiting, overlap)


def main():
    name, path, *rest = sys.argv[1:]
    chosen = {function.__name__: function for function in MEASUREMENTS}[name]
    with pycoll.init(timeout=60) as comm:
        found = chosen(comm, *rest)
        if comm.rank == 0:
            Path(path).write_text(json.dumps(found, default=float))


if __name__ == "__main__":
    main()
