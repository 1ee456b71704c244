"""Cases: one call of a collective on all ranks, made in the parent and judged by the ranks.

A world of ranks runs a whole list of cases, because starting it takes longer than most calls.
"""

import math
import mmap
import zlib
from dataclasses import dataclass, field

import numpy as np

import oracle
from pycoll.config import Config
from pycoll.testing import run_processes, run_threads

REDUCING = ["all_reduce", "reduce_scatter", "reduce"]
MOVING = ["all_gather", "broadcast", "gather", "scatter", "all_to_all"]
ROOTED = ["reduce", "broadcast", "gather", "scatter"]
DIVIDING = ["reduce_scatter", "scatter", "all_to_all"]  # the first dimension, by the world size
IN_PLACE = ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all"]

# new: the result is a new array. The others pass out=; misaligned: at odd addresses.
PRIVATE = ["new", "out", "in_place", "misaligned"]
SYMMETRIC = ["symmetric", "symmetric_in_place", "symmetric_misaligned"]
# Of these the inputs lie in symmetric memory, the results elsewhere.
SYMMETRIC_INPUT = ["symmetric_input", "symmetric_input_new"]
SMALL_CELLS = Config(timeout_s=10, cell_bytes=4096, heap_bytes=1 << 28)
GUARD = 0xA5
_MARGIN = 64

# Worlds as (kind, ranks); threads where there are many of them.
THREADS = [("threads", n) for n in (1, 2, 3, 4, 5, 8)]
PROCESSES = [("processes", n) for n in (2, 3, 4)]
WORLDS = THREADS + PROCESSES


@dataclass
class Case:
    """One call.

    Attributes:
        collective: Name of the method.
        parts: Input of each rank.
        want: Result of each rank; None where there is none.
        options: Keyword arguments of the call.
        memory: One of PRIVATE, SYMMETRIC and SYMMETRIC_INPUT.
    """

    collective: str
    parts: list
    want: list
    options: dict = field(default_factory=dict)
    memory: str = "new"

    def __str__(self):
        part = self.parts[0]
        options = ", ".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.collective}({part.dtype}{list(part.shape)}, {options}), {self.memory}"


def make(collective, name, n, shape, *, data=oracle.random, memory="new", order="tree", **options):
    """Make a case; ``shape`` is that of a block.

    Args:
        collective: Name of the collective.
        name: Name of the dtype.
        n: World size.
        shape: Shape, or number of elements, of one rank's share.
        data: Function of (rng, dtype name, shape).
        memory: Where the arrays lie.
        order: Order of a reduction, as the result must show; not passed on.
        **options: Arguments of the call.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    full = (n * shape[0], *shape[1:]) if collective in DIVIDING else shape
    rng = np.random.default_rng(zlib.crc32(f"{collective}{name}{n}{shape}".encode()))
    parts = [data(rng, name, full) for _ in range(n)]
    root, op = options.get("root", 0), options.get("op", "sum")
    want = oracle.expected(collective, parts, op, order, root)
    return Case(collective, parts, want, options, memory)


def allocate(comm, shape, dtype, memory):
    """Return an array with guard bytes around it, and a function that tells if they are intact."""
    nbytes = math.prod(shape) * dtype.itemsize
    total = nbytes + 2 * _MARGIN
    symmetric = memory.startswith("symmetric")
    raw = comm.empty(total, np.uint8) if symmetric else np.empty(total, np.uint8)
    raw[:] = GUARD
    start = _MARGIN + (1 if memory.endswith("misaligned") else 0)
    array = raw[start : start + nbytes].view(dtype).reshape(shape)

    def intact():
        return (raw[:start] == GUARD).all() and (raw[start + nbytes :] == GUARD).all()

    return array, intact


def holds_data(comm, case):
    """Whether this rank's input matters to the call."""
    root = case.options.get("root", 0)
    return case.collective not in ("broadcast", "scatter") or comm.rank == root


def arrays(comm, case):
    """Return input, output (None where the call makes it), and functions that check the guards."""
    part, want = case.parts[comm.rank], case.want[comm.rank]
    if case.memory.endswith("in_place") and want is not None:
        whole, intact = allocate(comm, max(part, want, key=np.size).shape, part.dtype, case.memory)
        block = np.split(whole, comm.world_size)[comm.rank] if part.size != want.size else whole
        x, out = (block, whole) if part.size < want.size else (whole, block)
        guards = [intact]
    else:
        x, x_intact = allocate(comm, part.shape, part.dtype, case.memory)
        guards, out = [x_intact], None
        if not case.memory.endswith("new") and want is not None:
            place = "out" if case.memory in SYMMETRIC_INPUT else case.memory
            out, out_intact = allocate(comm, want.shape, want.dtype, place)
            guards.append(out_intact)
    if holds_data(comm, case):
        x[...] = part
    return x, out, guards


def run_case(comm, case):
    """Run a case on one rank and return what is wrong with the outcome, or ""."""
    rank = comm.rank
    x, out, guards = arrays(comm, case)
    result = getattr(comm, case.collective)(x, out=out, **case.options)
    want = case.want[rank]
    if want is None or result is None:
        return "" if want is None and result is None else f"{case}: got {result!r} for {want!r}"
    wrong = oracle.differences(result, want)
    if out is not None and result is not out:
        wrong += " the result is not out;"
    if not all(intact() for intact in guards):
        wrong += " something was written outside of the arrays;"
    kept = holds_data(comm, case) and not case.memory.endswith("in_place")
    if kept and oracle.differences(x, case.parts[rank]):
        wrong += " the input was changed;"
    return f"{case}: rank {rank} {wrong}" if wrong else ""


def shared_float():
    """Return an array of one number that forked ranks share with each other."""
    return np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.float64)[:1]


def run_cases(comm, cases):
    """Run cases one after the other; return what is wrong."""
    return [wrong for wrong in (run_case(comm, case) for case in cases) if wrong]


def check(world, cases, config=None, timeout=60.0):
    """Run cases in a world of (kind, ranks) and fail with the first ones that go wrong."""
    kind, n = world
    run = run_threads if kind == "threads" else run_processes
    config = config or Config(timeout_s=10, heap_bytes=1 << 28)
    results = run(n, run_cases, cases, config=config, timeout=timeout)
    wrong = [line for result in results for line in result]
    assert not wrong, f"{len(wrong)} of {n * len(cases)} wrong:\n" + "\n".join(wrong[:10])
