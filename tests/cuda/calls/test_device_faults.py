"""What device code does when something is wrong: it says so, and nothing hangs."""

import threading
from ctypes import byref, c_uint64, c_void_p
from dataclasses import replace

import numpy as np
import pytest

import oracle
from device_library import (
    ABORTED,
    ARGUMENT,
    FOLLOWED,
    MISMATCH,
    SCHEDULE,
    TIMEOUT,
    TOO_LARGE,
    DeviceError,
    Library,
    Program,
    Spec,
    World,
    host_library,
    plans_of,
    spec_of,
)
from pycoll.algorithms import ALGORITHMS, find
from pycoll.schedule.lowering.plan import DONE, ENTERED, Opcode

RING = find("all_reduce", "ring")


@pytest.fixture(scope="module")
def library():
    return Library(host_library())


def arrays(n, count, seed=0):
    rng = np.random.default_rng(seed)
    return [oracle.exact(rng, "float32", count) for _ in range(n)]


def launch(world, plans, count=64, seed=1, **options):
    """Run a sum over plans; return inputs and outputs."""
    ins = arrays(world.n, count)
    outs = [np.zeros(count, np.float32) for _ in ins]
    world.library.schedule(seed)
    world.launch(
        world.call([spec_of(plan, "float32", count=count) for plan in plans]), ins, outs, **options
    )
    world.synchronize()
    return ins, outs


def right(ins, outs):
    return all(np.array_equal(out, np.sum(ins, axis=0)) for out in outs)


@pytest.mark.parametrize("name", ["ring", "one_shot", "two_shot_push", "halving_doubling"])
def test_a_missing_rank_is_named(library, name):
    n, gone = 4, 2
    with World(library, n) as world:
        plans = plans_of(find("all_reduce", name), n)
        launch(world, plans, absent=1 << gone, timeout_ms=50)
        failed = world.failed()
        assert failed == [rank for rank in range(n) if rank != gone]
        records = [world.error(rank) for rank in failed]
        assert {TIMEOUT} <= {record.kind for record in records} <= {TIMEOUT, FOLLOWED}
        assert all(record.waited_ns > 50e6 for record in records if record.kind == TIMEOUT)
        blamed = [record for record in records if record.peer == gone]
        assert blamed
        for record in blamed:
            assert record.expected >> 16 == 0
            assert record.expected & 0xFFFF >= ENTERED
            assert record.seen == 0
            assert record.rank in failed
            assert record.instruction < len(plans[record.rank].code)
        launch(world, plans, timeout_ms=50)  # a failed group stays failed, for all its ranks
        assert world.failed() == list(range(n))
        assert (world.error(gone).kind, world.error(gone).peer) == (FOLLOWED, gone)
        world.each("group_reset")
        assert world.failed() == []
        assert right(*launch(world, plans))


def without(plan, index):
    return replace(plan, code=np.delete(plan.code, index))


@pytest.mark.parametrize("peers", [False, True])
def test_a_dropped_signal_is_found(library, peers):
    n = 3
    plans = plans_of(RING, n)
    signals = np.flatnonzero(plans[0].code["op"] == Opcode.SIGNAL)
    with World(library, n) as world, pytest.raises(DeviceError, match="entered"):
        launch(world, [without(plans[0], signals[0]), *plans[1:]])
    found = []
    for index in signals[1:]:
        with World(library, n, peers=peers) as world:
            ins, outs = launch(world, [without(plans[0], index), *plans[1:]], timeout_ms=50)
            if world.failed():
                found.append(plans[0].code["arg"][index])
                assert any(world.error(rank).peer == 0 for rank in world.failed())
            else:  # a later signal stood in for it
                assert right(ins, outs)
    assert DONE in found


def test_a_dropped_wait_is_found_by_some_interleaving(library):
    n = 3
    plans = plans_of(RING, n)
    waits = np.flatnonzero(plans[1].code["op"] == Opcode.WAIT)
    folds = np.flatnonzero(plans[1].code["op"] == Opcode.FOLD)
    needed = [i for i in waits if i < folds[-1] and plans[1].code["arg"][i] > ENTERED]
    assert len(needed) > 1
    seen = []
    for index in needed:
        outcomes = set()
        for seed in range(25):
            with World(library, n) as world:
                broken = [plans[0], without(plans[1], index), plans[2]]
                outcomes.add(right(*launch(world, broken, seed=seed)) and not world.failed())
        seen.append(False in outcomes)
    assert any(seen)


def test_ranks_that_wait_for_each_other_do_not_hang(library):
    n = 3
    plans = plans_of(find("all_reduce", "one_shot"), n)
    late = []
    for plan in plans:  # says that it has entered only after all others have
        code = plan.code
        first = np.flatnonzero(code["op"] == Opcode.WAIT)[: n - 1]
        order = [*first, 0, *[i for i in range(1, len(code)) if i not in first]]
        late.append(replace(plan, code=code[order]))
    with World(library, n) as world:
        launch(world, late, timeout_ms=50)
        assert world.failed() != []
        assert {world.error(rank).kind for rank in world.failed()} <= {TIMEOUT, FOLLOWED}


def test_calls_that_do_not_match_are_refused(library):
    n = 3
    plans = plans_of(RING, n)
    with World(library, n, peers=True) as world:
        specs = [spec_of(plan, "float32", count=64 if plan.rank else 48) for plan in plans]
        ins, outs = arrays(n, 64), [np.zeros(64, np.float32) for _ in range(n)]
        library.schedule(4)
        world.launch(world.call(specs), ins, outs, timeout_ms=50)
        world.synchronize()
        records = [world.error(rank) for rank in world.failed()]
        mismatches = [record for record in records if record.kind == MISMATCH]
        assert mismatches
        assert all(0 in (record.rank, record.peer) for record in mismatches)
        assert all(record.expected != record.seen for record in mismatches)


def test_the_host_can_abort(library):
    with World(library, 2) as world:
        library.schedule(-1)
        plans = plans_of(RING, 2)
        handles = world.call([spec_of(plan, "float32", count=8) for plan in plans])
        ins, outs = arrays(2, 8), [np.zeros(8, np.float32) for _ in range(2)]
        world.launch(handles, ins, outs, absent=2, timeout_ms=60_000)
        waiter = threading.Thread(target=world.synchronize)
        waiter.start()
        world.each("group_abort")
        waiter.join(30)
        assert not waiter.is_alive()
        assert world.error(0).kind == ABORTED
        with pytest.raises(DeviceError, match="reset") as caught:
            world.launch(handles, ins, outs)
        assert caught.value.status == ARGUMENT
        world.each("group_reset")
        world.launch(handles, ins, outs)
        world.synchronize()
        assert right(ins, outs)


def test_the_device_has_the_very_bytes_of_the_plans(library):
    for entry in ALGORITHMS:
        for n in (2, 5):
            if not entry.worlds(n):
                continue
            plans = plans_of(entry, n)
            with World(library, n) as world:
                handle = world.call([spec_of(p, "float32", count=n * 8) for p in plans])[0]
                for plan in plans:
                    program = Program()
                    library.call_program(handle, plan.rank, byref(program))
                    for address, records in (
                        (program.code, plan.code),
                        (program.operands, plan.operands),
                    ):
                        there = np.zeros_like(records)
                        size = c_uint64(there.nbytes)
                        library.copy(c_void_p(there.ctypes.data), c_void_p(address), size, None)
                        assert there.tobytes() == records.tobytes()
                    assert program.ninstructions == len(plan.code)
                    assert program.noperands == len(plan.operands)


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"dtype": 99}, ARGUMENT, "dtype 99"),
        ({"op": 5}, ARGUMENT, "no operation 5"),
        ({"rank": 2}, SCHEDULE, "one of rank 2"),
        ({"chunk": 1}, SCHEDULE, "do not hold"),
        ({"chunks": 1}, SCHEDULE, "chunks"),
        ({"ninstructions": 1}, SCHEDULE, None),
    ],
)
def test_bad_calls_are_refused_when_they_are_made(library, change, status, text):
    with World(library, 2) as world:
        specs = [spec_of(plan, "float32", count=64) for plan in plans_of(RING, 2)]
        for name, value in change.items():
            setattr(specs[0], name, value)
        if text is None:  # the first instruction alone is a plan; without any it is none
            specs[0].ninstructions = 0
            text = "entered"
        with pytest.raises(DeviceError, match=text) as caught:
            world.call(specs)
        assert caught.value.status == status


def test_bad_launches_are_refused(library):
    with World(library, 8, max_blocks=64, cell_bytes=0) as world:
        plans = plans_of(find("all_reduce", "recursive_doubling"), 8)
        with pytest.raises(DeviceError, match="a cell has 0") as caught:
            world.call([spec_of(plan, "float32", count=64) for plan in plans])
        assert caught.value.status == ARGUMENT
        handles = world.call([spec_of(p, "float32", count=64) for p in plans_of(RING, 8)])
        ins = arrays(8, 64)
        for options, status in (
            ({"blocks": 9}, TOO_LARGE),
            ({"blocks": 65}, ARGUMENT),
            ({"lanes": 17}, ARGUMENT),
            ({"method": 9}, ARGUMENT),
        ):
            with pytest.raises(DeviceError) as caught:
                world.launch(handles, ins, ins, **options)
            assert caught.value.status == status
        odd = [array.view(np.uint8)[1:253] for array in ins]
        with pytest.raises(DeviceError, match="aligned"):
            world.launch(handles, odd, ins)
        spec = (Spec * 1)(spec_of(plans_of(RING, 8)[0], "float32", count=64))
        with pytest.raises(DeviceError, match="1 plans for 8 ranks"):
            library.call_create(world.groups[0], spec, 1, byref(c_void_p()))


@pytest.mark.parametrize("peers", [False, True])
def test_what_is_refused_memory_leaves_none_behind(library, peers):
    """A group takes records and control memory, a call its programs."""
    before = library.dll.pycoll_host_allocated(-1)
    try:
        for refused in range(2 if peers else 4):
            library.dll.pycoll_host_allocated(refused)
            with pytest.raises(DeviceError, match="refused"):
                World(library, 3, peers=peers)
            assert library.dll.pycoll_host_allocated(-1) == before
        with World(library, 3, peers=peers) as world:
            made = library.dll.pycoll_host_allocated(0)
            plans = plans_of(RING, 3)
            with pytest.raises(DeviceError, match="refused"):
                world.call([spec_of(plan, "float32", count=64) for plan in plans])
            assert library.dll.pycoll_host_allocated(-1) == made
        assert library.dll.pycoll_host_allocated(-1) == before
    finally:
        library.dll.pycoll_host_allocated(-1)
