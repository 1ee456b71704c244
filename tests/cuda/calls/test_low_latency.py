"""Small calls in packets, compiled for the host: bits, flags that are old, halves seen apart."""

import ctypes
from ctypes import byref, c_void_p

import numpy as np
import pytest

import oracle
from cuda.calls.test_device import Call, run
from device_library import (
    DIRECT,
    FOLLOWED,
    INTERPRET,
    LOW_LATENCY,
    MISMATCH,
    TIMEOUT,
    DeviceError,
    Library,
    World,
    host_library,
    plans_of,
    spec_of,
)
from pycoll.algorithms import ALGORITHMS, find
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.plan import ENTERED

ONE_SHOT = find("all_reduce", "one_shot")
MOST = 256 << 10  # bytes from all peers, up to which packets are chosen
SLOTS = 2 << 20  # bytes of packets in the control memory of a rank


@pytest.fixture(scope="module")
def library():
    return Library(host_library())


def uses_packets(world, call):
    """Return whether packets are chosen for a call."""
    return world.info(world.call(call.specs)[0]).kernel.startswith(b"low_latency")


def test_plans_of_one_fold_are_sent_in_packets(library):
    """And no others: all ranks send or none, though the plan of one may look like one fold."""
    found = set()
    for entry in ALGORITHMS:
        for n in (2, 3, 8):
            if not entry.worlds(n) or not COLLECTIVES[entry.collective].reduces:
                continue
            for peers in (False, True):
                with World(library, n, peers=peers) as world:
                    handles = world.call(Call(entry, n, "float32", 9).specs)
                    kinds = {world.info(handle).kernel.split()[0] for handle in handles}
                    assert len({kind == b"low_latency" for kind in kinds}) == 1
                    if b"low_latency" in kinds:
                        found.add((entry.collective, entry.name.removesuffix("_rank"), n))
    assert found >= {(c, name, n) for c, name in PLANS for n in (2, 3, 8)}


PLANS = [("all_reduce", "one_shot"), ("all_reduce", "two_shot_push"), ("reduce_scatter", "direct")]


@pytest.mark.parametrize(("collective", "name"), PLANS)
@pytest.mark.parametrize("peers", [False, True])
def test_bits(library, collective, name, peers):
    """Odd sizes, types, orders, places that are not aligned, averages, interleavings."""
    dtypes = ["float32", "bfloat16", "float16", "float64", "int64", "uint32"]
    for n in range(2, 9):
        for order in ("", "_rank"):
            entry = find(collective, name + order)
            with World(library, n, peers=peers) as world:
                calls = [
                    Call(
                        entry,
                        n,
                        dtypes[(n + i) % 6],
                        length,
                        op=("sum", "avg")[i % 2],
                        offset=i % 3,
                        in_place=i % 2 == 0,
                        salt=i,
                    )
                    for i, length in enumerate((1, 2, 7, 33, 130))
                ]
                assert all(uses_packets(world, call) for call in calls)
                run(library, world, calls, seed=n, lanes=1 + n % 2)


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("epoch", [0, 65529])
def test_many_calls_of_all_kinds(library, peers, epoch):
    """Flags pass zero where the epoch is near its wrap-around."""
    n = 3
    entries = [ONE_SHOT, find("all_reduce", "two_shot_push"), find("reduce_scatter", "direct")]
    entries += [find("all_reduce", "ring"), find("broadcast", "binomial")]
    methods = [LOW_LATENCY, DIRECT, LOW_LATENCY, INTERPRET, LOW_LATENCY]
    for seed in range(3):
        with World(library, n, peers=peers) as world:
            world.each("group_set_epoch", epoch)
            library.schedule(seed)
            calls = []
            for i in range(20):
                one = i % 5 < 3
                call = Call(entries[i % 5], n, "float32", 1 + 37 * i % 90, salt=i)
                calls.append(call)
                method = methods[(i + seed) % 5] if one else 0
                form = {"blocks": 1 + (i + seed) % 3, "lanes": 1 + i % 2, "method": method}
                world.launch(world.call(call.specs), call.ins, call.outs, **form)
            world.synchronize()
            assert world.failed() == []
            for call in calls:
                call.check()


def test_interleavings(library):
    """A half of a packet may be seen without the other one, and peers may be a call ahead."""
    for seed in range(40):
        n = 2 + seed % 3
        with World(library, n, peers=True) as world:
            calls = [Call(ONE_SHOT, n, "float32", 5 + 3 * i, salt=i) for i in range(5)]
            run(library, world, calls, seed, blocks=1 + seed % 2, lanes=1)


def test_empty_chunks(library):
    """The last ranks get nothing, and are not ahead of the others all the same."""
    entry = find("reduce_scatter", "direct")
    for peers in (False, True):
        for seed in range(5):
            with World(library, 4, peers=peers) as world:
                plans = plans_of(entry, 4)
                parts = [
                    [oracle.exact(np.random.default_rng((i, r)), "float32", 6) for r in range(4)]
                    for i in range(6)
                ]
                outs = [[np.zeros(2, np.float32) for _ in range(4)] for _ in range(6)]
                library.schedule(seed)
                for ins, out in zip(parts, outs, strict=True):
                    specs = [spec_of(plan, "float32", count=6, chunk=2) for plan in plans]
                    world.launch(world.call(specs), ins, out, method=LOW_LATENCY)
                world.synchronize()
                assert world.failed() == []
                for ins, out in zip(parts, outs, strict=True):
                    assert np.concatenate(out).tolist() == [*np.sum(ins, axis=0), 0, 0]


def slots_of(world, max_blocks=8):
    """Return the packets of all peers: [rank][buffer, source, packet, half, (data, flag)]."""
    n, found = world.n, []
    cards = -(-(384 + 4 * n * max_blocks) // 128) * 128
    packets = SLOTS // (2 * n) // 16
    for group in world.groups:
        control = c_void_p()
        world.library.group_control(group, byref(control))
        words = ctypes.c_uint32 * (2 * n * packets * 4)
        memory = words.from_address(control.value + cards + 32 * n * max_blocks)
        found.append(np.frombuffer(memory, np.uint32).reshape(2, n, packets, 2, 2))
    return found


@pytest.mark.parametrize("renewed", [False, True])
def test_flags_that_are_as_old_as_can_be(library, renewed):
    """What 2**32 calls have left behind is like new, unless slots have been renewed in between."""
    n, number, right = 2, 3 if renewed else -6, []
    for seed in range(8):
        with World(library, n, peers=True) as world:
            world.each("group_set_epoch", 65536 - 7)
            for rank, slots in enumerate(slots_of(world)):
                slots[number % 2, 1 - rank, 1:, :, 1] = (number + 1) % 2**32
            small = Call(ONE_SHOT, n, "float32", 1)
            large = Call(ONE_SHOT, n, "float32", 24, salt=1)
            library.schedule(seed)
            for call in [small] * (number + 7) + [large]:
                world.launch(world.call(call.specs), call.ins, call.outs, blocks=6, lanes=4)
            world.synchronize()
            assert world.failed() == []
            small.check()
            pairs = zip(large.outs, large.want, strict=True)
            right += [not oracle.differences(out[: want.size], want) for out, want in pairs]
    assert all(right) == renewed


def test_lanes_as_threads(library):
    for n, peers in ((2, True), (4, False), (3, True)):
        with World(library, n, peers=peers) as world:
            calls = [Call(ONE_SHOT, n, "float32", 100 + i, salt=i) for i in range(6)]
            run(library, world, calls, seed=-1, timeout_ms=60_000)


def test_the_size_decides(library):
    for n in (2, 3, 8):
        with World(library, n, peers=n == 3) as world:
            length = MOST // 4 // (n - 1) // n  # of the part of a rank
            for more, chosen in ((0, True), (1, False)):
                call = Call(ONE_SHOT, n, "float32", length + more)
                assert uses_packets(world, call) == chosen


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        ("all_reduce", "one_shot"),
        ("all_reduce", "two_shot_push"),
        ("all_gather", "direct_push"),
        ("all_to_all", "direct"),
        ("broadcast", "direct"),
    ],
)
def test_a_rank_that_does_not_come(library, plan, peers):
    """Of peers, nobody leaves a call before all have begun it: not the root of a broadcast, too."""
    n, gone = 3, 1
    entry = find(*plan)
    root = {"root": gone} if "root" in entry.params else {}
    with World(library, n, peers=peers) as world:
        call = Call(entry, n, "float32", 30, **root)
        handles = world.call(call.specs)
        library.schedule(3)
        if peers:
            world.launch(
                [h for r, h in enumerate(handles) if r != gone],
                [a for r, a in enumerate(call.ins) if r != gone],
                [a for r, a in enumerate(call.outs) if r != gone],
                timeout_ms=50,
            )
        else:
            world.launch(handles, call.ins, call.outs, absent=1 << gone, timeout_ms=50)
        world.synchronize()
        failed = [r for r in range(n) if r != gone]
        assert world.failed() == failed
        records = [world.error(rank) for rank in failed]
        assert {TIMEOUT} <= {record.kind for record in records} <= {TIMEOUT, FOLLOWED}
        for record in records:
            assert (record.peer, record.expected, record.seen) == (gone, ENTERED, 0)
        world.each("group_reset")
        run(library, world, [call, Call(ONE_SHOT, n, "float32", 8)], seed=4)


def mismatches(library, given, seed):
    """Make calls of peers, one of specs for each rank; return the records of who did not fit."""
    with World(library, len(given), peers=True) as world:
        ins = [np.ones(80, np.float32) for _ in given]
        outs = [np.zeros(80, np.float32) for _ in given]
        library.schedule(seed)
        world.launch(world.call(given), ins, outs, timeout_ms=50, method=LOW_LATENCY)
        world.synchronize()
        records = [world.error(rank) for rank in world.failed()]
        return [record for record in records if record.kind == MISMATCH]


def test_calls_that_do_not_match(library):
    """Another size, another type of the same size, another form: named, whoever comes first."""
    n = 3
    plans = plans_of(ONE_SHOT, n)

    def specs(count, dtype):
        code = len(dtype)  # of the type, in what ranks compare
        return [spec_of(plan, dtype, count=count, descriptor=code) for plan in plans]

    for other in ((48, "float32"), (80, "float32"), (64, "int32")):
        for seed in range(6):
            given = [specs(64, "float32") if rank else specs(*other) for rank in range(n)]
            named = mismatches(library, given, seed)
            assert named
            assert all(0 in (record.rank, record.peer) for record in named)
            assert all(record.expected != record.seen for record in named)


def is_refused(library, entry, n, length):
    """See that a call that is asked for packets is an error."""
    with World(library, n) as world:
        call = Call(entry, n, "float32", length)
        with pytest.raises(DeviceError, match="low-latency protocol cannot run this call"):
            world.launch(world.call(call.specs), call.ins, call.outs, method=LOW_LATENCY)


def test_where_packets_cannot_be_sent_they_are_refused(library):
    for n, entry, length in (
        (4, find("all_reduce", "ring"), 8),
        (8, ONE_SHOT, 20_000),
    ):
        is_refused(library, entry, n, length)
    with World(library, 2) as world:
        handles = world.call(Call(find("all_reduce", "ring"), 2, "int32", 4, op="max").specs)
        with pytest.raises(DeviceError, match="no kernel of its own"):
            world.info(handles[0], DIRECT)
