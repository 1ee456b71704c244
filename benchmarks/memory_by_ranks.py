"""Memory of a rank, and start-up, by the number of ranks on one host; every sum is checked.

``python benchmarks/memory_by_ranks.py 2 8 32 128`` starts so many ranks, one number after the
other; each all-reduces 1 MiB. With 512 it takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

STARTED = "MEMORY_BY_RANKS_STARTED"
COUNT = 1 << 18


def kilobytes(name: str, path: str) -> float:
    """Read a number of kB that the kernel tells of this process."""
    lines = Path(path).read_text(encoding="ascii").splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def rank() -> None:
    """Join, sum, look at this process; rank 0 prints the line of the table."""
    import pycoll

    with pycoll.init(timeout=200) as comm:
        n = comm.world_size
        total = comm.all_reduce(np.full(COUNT, comm.rank + 1, np.float32))
        took = time.time() - float(os.environ[STARTED])
        if not np.all(total == n * (n + 1) / 2):
            raise SystemExit(f"rank {comm.rank}: wrong sum {total[:4]}")
        own = kilobytes("Pss_Anon", "/proc/self/smaps_rollup")
        shared = kilobytes("Pss_Shmem", "/proc/self/smaps_rollup")
        address = kilobytes("VmSize", "/proc/self/status")
        facts = comm.all_gather(np.array([own, shared, address, took]))
        facts = facts.reshape(n, 4)
        if comm.rank == 0:
            own, shared, address = facts[:, :3].mean(axis=0) / 1024
            first = facts[:, 3].max()
            cells = [f"{n}", f"{own:.1f} MiB", f"{shared:.2f} MiB", f"{address / 1024:.1f} GiB"]
            print(f"| {' | '.join(cells)} | {first:.1f} s |", flush=True)


def main() -> int:
    """Start ranks, or be one."""
    if "PYCOLL_RANK" in os.environ:
        rank()
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", nargs="*", type=int, default=[2, 8, 32, 128])
    print("| ranks | own memory | shared memory used | address space | start to first sum |")
    print("|---:|---:|---:|---:|---:|", flush=True)
    for n in parser.parse_args().ranks:
        words = [sys.executable, "-m", "pycoll", "run", "-n", str(n), __file__]
        environment = {**os.environ, STARTED: repr(time.time()), "OMP_NUM_THREADS": "1"}
        if status := subprocess.run(words, env=environment, check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
