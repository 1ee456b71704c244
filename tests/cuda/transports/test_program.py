"""Plans of messages as NCCL would run them, under its rules, against the oracle and the engine."""

import threading

import numpy as np
import pytest

import oracle
from cuda.memory_wire import MemoryWire, Network, NumpyDevice, Unmatched
from pycoll.algorithms import ALGORITHMS
from pycoll.cuda.transports.bound_calls import extent_of
from pycoll.cuda.transports.program import Copy, Group, execute, lower
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.selection.select import select
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.messages import message_plans
from pycoll.testing import run_threads
from pycoll.types import DType, Kind, Order, ReduceOp

NAMES = [f"{a.collective}/{a.name}" for a in ALGORITHMS]


def spec_of(entry, n, block, name="float32", op="sum", root=0):
    """Return a call on blocks (of the vector where it is the whole) of so many elements."""
    promise = COLLECTIVES[entry.collective]
    parts = "own" in (promise.in_layout, promise.out_layout) or promise.transposes
    dtype, count = DType[name.upper()], block * n if parts else block
    params = select(entry.collective, count * dtype.itemsize, n, algorithm=entry).params
    params = {**params, "root": root} if "root" in entry.params else params
    return CallSpec(
        kind=Kind[entry.collective.upper()],
        collective=entry.collective,
        algorithm=entry,
        params=tuple(sorted(params.items())),
        direct=False,
        dtype=int(dtype),
        itemsize=dtype.itemsize,
        count=count,
        op=ReduceOp[op.upper()] if promise.reduces else ReduceOp.SUM,
        order=Order.ANY,
        root=root,
    )


def run_world(spec, n, parts, sizes, **options):
    """Run all ranks over the wire in memory; return what each rank has in its output."""
    plans = message_plans(spec.algorithm.schedule(n, **dict(spec.params)))
    network, results, errors = Network(n), [None] * n, []
    name = DType(spec.dtype).name.lower()

    def rank(r):
        try:
            program = lower(plans[r], extent_of(spec, plans[r], n), **options)
            x = parts[r].copy()
            out = np.full(sizes[r], 7).astype(oracle.dtype(name))
            scratch = np.full(program.scratch_bytes + 16, 0xA5, np.uint8)
            pointers = [a.__array_interface__["data"][0] for a in (x, out, scratch)]
            inside(program, (x.nbytes, out.nbytes, program.scratch_bytes), x.itemsize)
            execute(
                program, pointers, MemoryWire(network, r), NumpyDevice(), spec.dtype, spec.op, 0
            )
            results[r] = out
            assert oracle.differences(x, parts[r]) == "", "the input was changed"
            assert (scratch[program.scratch_bytes :] == 0xA5).all(), "written beyond the scratch"
        except BaseException as error:
            errors.append(error)
        finally:
            network.leave()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert network.left_over() == []
    return results


def inside(program, sizes, itemsize):
    """Check that nothing lies outside of the memory that there is, before anything is touched."""
    pieces = []
    for step in program.steps:
        if isinstance(step, Group):
            pieces += [(m.ref, m.nbytes) for m in (*step.sends, *step.receives)]
        elif isinstance(step, Copy):
            pieces += [(step.src, step.nbytes), (step.dst, step.nbytes)]
        else:
            pieces += [(ref, step.count * itemsize) for ref in (*step.srcs, *step.dsts)]
    assert all(0 <= ref.offset <= sizes[ref.region] - size for ref, size in pieces), pieces


def trial(entry, n, block, name="float32", op="sum", **options):
    """Run one call; return results, expected results where the order is pinned, and the parts."""
    root = n // 2 if "root" in entry.params else 0
    spec = spec_of(entry, n, block, name, op, root)
    rng = np.random.default_rng(n * 1000 + block)
    shares = entry.collective in ("reduce_scatter", "scatter", "all_to_all")
    parts = [oracle.random(rng, name, block * n if shares else block) for _ in range(n)]
    order = "rank" if entry.order == "rank" else "tree"
    want = oracle.expected(entry.collective, parts, op, order, root)
    if entry.collective == "exscan":  # what the first rank gets is no work of a plan
        want[0] = None
    sizes = [0 if w is None else w.size for w in want]
    return run_world(spec, n, parts, sizes, **options), want, parts, root


def same_as_engine(entry, n, parts, root, op, results):
    """Compare bits with what the shared-memory engine makes of the same algorithm."""

    def rank(comm):
        method = getattr(comm, entry.collective)
        more = {"op": op} if COLLECTIVES[entry.collective].reduces else {}
        more |= {"root": root} if COLLECTIVES[entry.collective].rooted else {}
        return method(parts[comm.rank], algorithm=entry, **more)

    for r, got in enumerate(run_threads(n, rank)):
        if got is not None and not (entry.collective == "exscan" and r == 0):
            assert oracle.differences(results[r], got) == "", (entry.name, n, r)


@pytest.mark.parametrize("entry", ALGORITHMS, ids=NAMES)
def test_every_schedule_gives_the_bits_of_the_engine(entry):
    for n in range(1, 10):
        if not entry.worlds(n):
            continue
        block = (37, 1, 5)[n % 3]  # odd remainders, and fewer elements than chunks
        results, want, parts, root = trial(entry, n, block)
        for got, expected in zip(results, want, strict=True):
            if expected is not None and entry.order != "any":
                assert oracle.differences(got, expected) == "", (n, block)
        if entry.order == "any" or n in (3, 8):
            same_as_engine(entry, n, parts, root, "sum", results)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "int8", "uint64"])
@pytest.mark.parametrize("op", ["avg", "max"])
def test_types_and_operations(name, op):
    for entry in ALGORITHMS:
        if op == "avg" and "scan" in entry.collective:
            continue
        if COLLECTIVES[entry.collective].reduces and entry.worlds(3):
            results, _, parts, root = trial(entry, 3, 41, name, op)
            same_as_engine(entry, 3, parts, root, op, results)


@pytest.mark.parametrize("limit", [200])
def test_scratch_memory_is_bounded_by_cutting_chunks(limit):
    n = 4
    for entry in ALGORITHMS:
        results, _, parts, root = trial(entry, n, 31, scratch_limit=limit)
        same_as_engine(entry, n, parts, root, "sum", results)


def test_whole_chunks_travel_without_copies():
    """Nothing is copied around when chunks are equal and follow each other."""
    entry = next(a for a in ALGORITHMS if (a.collective, a.name) == ("all_reduce", "ring"))
    spec = spec_of(entry, 4, 4 * 64)
    plan = message_plans(entry.schedule(4))[1]
    program = lower(plan, extent_of(spec, plan, 4))
    assert sum(isinstance(step, Group) for step in program.steps) == 6
    assert not any(isinstance(step, Copy) for step in program.steps)
    groups = [step for step in program.steps if isinstance(step, Group)]
    assert sum(m.nbytes for group in groups for m in group.sends) == 2 * 3 * 64 * 4
    assert program.scratch_bytes == 64 * 4  # one slot


def test_a_group_is_one_phase_of_one_round():
    entry = next(a for a in ALGORITHMS if a.name == "two_shot_push")
    spec = spec_of(entry, 3, 96)
    plan = message_plans(entry.schedule(3))[0]
    groups = [s for s in lower(plan, extent_of(spec, plan, 3)).steps if isinstance(s, Group)]
    assert [(len(g.sends), len(g.receives)) for g in groups] == [(2, 2), (2, 2)]


@pytest.mark.parametrize("fault", ["lost", "short", "self-deadlock"])
def test_the_wire_keeps_the_rules(fault):
    """What NCCL would hang on is an error here: a test that could not fail would prove nothing."""
    data = np.zeros(16, np.uint8)
    pointer = data.__array_interface__["data"][0]
    network, errors = Network(2), []

    def rank(r):
        wire = MemoryWire(network, r)
        try:
            if fault == "self-deadlock":  # each sends before it receives, in groups of their own
                with wire.group():
                    wire.send(pointer, 8, 1 - r, 0)
            with wire.group():
                if r == 0 and fault != "self-deadlock":
                    wire.send(pointer, 8 if fault == "lost" else 4, 1, 0)
                elif fault != "lost":
                    wire.recv(pointer + 8, 8, 1 - r, 0)
        except Unmatched as error:
            errors.append(error)
        finally:
            network.leave()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors
