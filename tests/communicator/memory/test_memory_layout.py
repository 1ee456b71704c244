"""Where symmetric memory lies."""

import itertools
import subprocess
import sys

import pytest

from pycoll.config import Config
from pycoll.testing import run_threads

REACH = 1 << 28  # address bits of which the first-level cache of AMD's Zen makes its hash


@pytest.mark.parametrize("heap_bytes", [16 << 20, 1 << 28, 1 << 30])
def test_arrays_of_two_ranks_are_not_taken_for_each_other_by_a_cache(heap_bytes):
    config = Config(timeout_s=10, heap_bytes=heap_bytes)
    starts = run_threads(8, lambda comm: comm.zeros(1000).ctypes.data, config=config)
    for a, b in itertools.combinations(starts, 2):
        assert (a - b) % REACH
        assert abs(a - b) >= heap_bytes


def test_a_region_holds_what_it_says():
    config = Config(timeout_s=10, heap_bytes=16 << 20)

    def rank(comm):
        whole = comm.empty((16 << 20) // 4)
        with pytest.raises(MemoryError):
            comm.empty(1)
        whole[:] = comm.rank + 1
        comm.all_reduce(whole, out=whole)
        return set(whole.tolist())

    assert run_threads(3, rank, config=config) == [{6.0}] * 3


STREAMS = """
import os, sys
import pycoll
comm = pycoll.init()
comm.empty(1 << 20)
part = comm.split(0)
places = [f"/proc/self/fd/{fd}" for fd in range(3)]
taken = [os.readlink(place) for place in places if os.path.lexists(place)]
sys.exit(str(taken) if any(name != os.devnull for name in taken) else 0)
"""


@pytest.mark.parametrize("n", [1, 2])
def test_memory_takes_no_place_of_a_closed_stream(n, tmp_path):
    """What is written or opened there later would end in the memory, or take its place."""
    program = tmp_path / "program.py"
    program.write_text(STREAMS)
    job = ["-m", "pycoll", "run", "-n", str(n)] if n > 1 else []
    shell = 'exec "$@" <&- >&- 2>&-'
    command = ["sh", "-c", shell, "sh", sys.executable, *job, str(program)]
    assert subprocess.run(command, timeout=60).returncode == 0
