"""What `PYCOLL_SYMMETRIC=1` changes: for calls of an unchanged program, and for NumPy alone.

    PYCOLL_SYMMETRIC=0 pycoll run -n 2 benchmarks/numpy_memory.py
    PYCOLL_SYMMETRIC=1 pycoll run -n 2 benchmarks/numpy_memory.py

Prints medians in microseconds; let the two take turns.
"""

import time
from collections.abc import Callable
from statistics import median

import numpy as np

import pycoll

SIZES = [1 << k for k in (14, 16, 18, 20, 22, 24)]
WARM, TURNS = 12, 9


def timed(step: Callable[[], object], nbytes: int) -> float:
    """Return the median time of a step in microseconds."""
    repeats = max(3, min(200, (4 << 20) // nbytes))
    for _ in range(WARM):
        step()
    times = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        for _ in range(repeats):
            step()
        times.append((time.perf_counter() - begin) / repeats * 1e6)
    return median(times)


def steps(comm: pycoll.Communicator, nbytes: int) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    n, count = comm.world_size, nbytes // 4
    x, whole = np.ones(count, np.float32), np.empty(comm.world_size * count, np.float32)
    block = np.empty(count // n, np.float32)
    return {
        "all_reduce": lambda: comm.all_reduce(x, "max", out=x),
        "new array": lambda: comm.all_reduce(x),
        "broadcast": lambda: comm.broadcast(x),
        "all_gather": lambda: comm.all_gather(x, out=whole),
        "all_to_all": lambda: comm.all_to_all(x),
        "reduce_scatter": lambda: comm.reduce_scatter(x, out=block),
        "a + b": lambda: x + x,
        "np.zeros": lambda: np.zeros(count, np.float32),
        "np.empty": lambda: np.empty(count, np.float32),
    }


def main() -> None:
    """Time everything on all ranks; rank 0 prints."""
    with pycoll.init() as comm:
        for nbytes in SIZES:
            times = {name: timed(step, nbytes) for name, step in steps(comm, nbytes).items()}
            if comm.rank == 0:
                line = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
                print(f"{nbytes >> 10:6d} KiB  {line}", flush=True)


if __name__ == "__main__":
    main()
