"""NumPy's arrays in symmetric memory without being asked for: `Config.symmetric`."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

import pycoll
from cases import IN_PLACE, MOVING, PRIVATE, REDUCING, ROOTED, SYMMETRIC, make, run_case
from pycoll.config import Config
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.symmetric_memory import AUTOMATIC_BYTES
from pycoll.runtime.calls.prepared import CallRequest
from pycoll.testing import run_processes, run_threads
from pycoll.types import Kind

MIB = 1 << 20
AUTOMATIC = Config(timeout_s=10, heap_bytes=64 * MIB, symmetric="numpy")
LARGE = AUTOMATIC_BYTES  # elements: of any type and world large enough in each block
COLLECTIVES = [*REDUCING, *MOVING]


def in_heap(comm, x):
    """Whether an array lies in symmetric memory."""
    return comm._session.memory.heap.contains(x.ctypes.data, x.nbytes)


def is_direct(comm, x, out):
    """Whether an all_reduce would work on symmetric memory."""
    request = CallRequest(Kind.ALL_REDUCE)
    return comm._session.prepare(request, x, out).binding.direct


def mixed(comm, cases):
    """Run cases with arrays of another kind on every rank; return what is wrong."""
    wrong = []
    for turn, (case, memories) in enumerate(cases):
        memory = memories[(comm.rank + turn) % len(memories)]
        wrong.append(run_case(comm, replace(case, memory=memory)))
    return [text for text in wrong if text]


def mixtures(collective):
    """Return lists of memories that ranks may have beside each other."""
    apart = [m for m in PRIVATE + SYMMETRIC if not m.endswith("in_place")]
    inside = [m for m in PRIVATE + SYMMETRIC if m.endswith("in_place")]
    return [apart, inside, [*apart, *inside]] if collective in IN_PLACE else [apart]


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_mixture_of_memories(collective, n):
    """Large or small, from the heap or from elsewhere, in place or not: the oracle's bits."""
    sizes = 3, AUTOMATIC_BYTES // 4 - 1, AUTOMATIC_BYTES // 4, LARGE + 1
    cases = [
        (make(collective, "float32", n, size), memories)
        for size in sizes
        for memories in mixtures(collective)
    ]
    for name in "uint8", "bfloat16", "float64", "complex64":
        if name != "complex64" or collective not in REDUCING:
            cases.append((make(collective, name, n, LARGE + 1), mixtures(collective)[0]))
    if collective in ROOTED:
        cases.append((make(collective, "float32", n, LARGE, root=n - 1), mixtures(collective)[0]))
    run = run_threads if n == 5 else run_processes
    for wrong in run(n, mixed, 2 * cases, config=AUTOMATIC, timeout=60):
        assert wrong == []


def test_in_the_background():
    def rank(comm):
        mine = np.frombuffer(bytearray(4 * LARGE), np.float32) if comm.rank else comm.zeros(LARGE)
        mine[:] = comm.rank + 1
        works = [comm.all_reduce(mine, async_op=True), comm.all_reduce(mine, out=mine)]
        return [float(works[0].wait()[-1]), float(mine[0])]

    assert run_processes(2, rank, config=AUTOMATIC) == [[3, 3], [3, 3]]


def test_what_numpy_makes():
    """Arrays of the least size or more come from the heap while it has room, others do not."""

    def rank(comm):
        memory = comm._session.memory
        end = memory.serve_numpy()
        small, least = np.ones(AUTOMATIC_BYTES - 1, np.uint8), np.ones(AUTOMATIC_BYTES, np.uint8)
        made = [np.zeros(MIB), least + 1, np.concatenate([least, least]), np.arange(LARGE)]
        assert not in_heap(comm, small)
        assert all(in_heap(comm, x) for x in (least, *made))
        assert is_direct(comm, made[0], made[0])
        assert not is_direct(comm, small, small)
        more_than_fits = np.zeros(128 * MIB, np.uint8)
        assert not in_heap(comm, more_than_fits)
        grown = np.ones(AUTOMATIC_BYTES, np.uint8)
        grown.resize(4 * AUTOMATIC_BYTES, refcheck=False)
        shrunk = np.arange(AUTOMATIC_BYTES, dtype=np.uint8)
        shrunk.resize(100, refcheck=False)
        assert (grown[:AUTOMATIC_BYTES] == 1).all()
        assert (shrunk == np.arange(100)).all()
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(np.ones(MIB)))
        thread.start()
        thread.join()
        assert not in_heap(comm, elsewhere[0])
        total = comm.all_reduce(elsewhere[0])
        with comm.symmetric():
            assert in_heap(comm, np.ones(3))
        end()
        assert not in_heap(comm, np.ones(MIB))
        return total.min(), total.max()

    assert run_processes(2, rank, config=AUTOMATIC) == [(2, 2), (2, 2)]


def test_a_child_made_by_fork_has_ordinary_arrays():
    def rank(comm):
        end = comm._session.memory.serve_numpy()
        shared = np.zeros(MIB)
        child = os.fork()
        if not child:
            own = np.ones(MIB)
            os._exit(int(in_heap(comm, own) or not in_heap(comm, shared) or own.sum() != MIB))
        _, status = os.waitpid(child, 0)
        end()
        return os.waitstatus_to_exitcode(status)

    assert run_processes(2, rank, config=AUTOMATIC) == [0, 0]


def test_init_serves_numpy_until_the_communicator_closes():
    with pycoll.init(symmetric="numpy") as comm:
        assert in_heap(comm, np.ones(MIB))
        assert comm.all_reduce(np.ones(MIB)).sum() == MIB
        with comm.dup() as other:
            assert in_heap(other, np.ones(MIB))
        assert in_heap(comm, np.ones(MIB))
        held = np.ones(MIB)
    assert held.sum() == MIB
    with pycoll.init() as comm:
        assert not in_heap(comm, np.ones(MIB))


@pytest.mark.parametrize(("text", "value"), [("1", "numpy"), ("numpy", "numpy"), ("0", "off")])
def test_the_variable(text, value):
    assert Config.from_env({"PYCOLL_SYMMETRIC": text}).symmetric == value


def test_a_value_that_is_none():
    with pytest.raises(ArgumentError, match=r"PYCOLL_SYMMETRIC='torch'.*accepted: off, numpy"):
        Config.from_env({"PYCOLL_SYMMETRIC": "torch"})


def test_ranks_that_differ(tmp_path):
    """Every rank hears of it when it joins, before any large call."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pycoll\n"
        "try:\n"
        "    pycoll.init(symmetric='numpy' if os.environ['PYCOLL_RANK'] == '1' else 'off')\n"
        "except pycoll.ArgumentError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-m", "pycoll", "run", "-n", "3", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.count("something else on others") == 3
