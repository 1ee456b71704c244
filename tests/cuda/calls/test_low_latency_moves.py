"""all_gather, all_to_all and broadcast in packets, compiled for the host."""

import pytest

from cuda.calls.test_device import Call, run
from cuda.calls.test_low_latency import is_refused, mismatches
from device_library import (
    INTERPRET,
    LOW_LATENCY,
    Library,
    World,
    host_library,
    plans_of,
    spec_of,
)
from pycoll.algorithms import ALGORITHMS, find
from pycoll.schedule.language.collectives import COLLECTIVES, OWN

MOST = 256 << 10  # bytes from a rank to all others, up to which packets are chosen
PLANS = [
    ("all_gather", "direct_push"),
    ("all_gather", "direct_pull"),
    ("all_to_all", "direct"),
    ("broadcast", "direct"),
    ("broadcast", "push_pull"),
]
PUSH = find("all_gather", "direct_push")


@pytest.fixture(scope="module")
def library():
    return Library(host_library())


def uses_packets(world, call):
    """Return whether packets are chosen for a call: of all its ranks."""
    names = {world.info(handle).kernel for handle in world.call(call.specs)}
    assert len(names) == 1
    return names == {b"low_latency move"}


def root_of(entry, n):
    return {"root": n // 2} if "root" in entry.params else {}


def test_plans_that_copy_inputs_into_outputs_are_sent_in_packets(library):
    """Whatever their steps are, and no others: what passes through outputs or slots is not."""
    found = set()
    for entry in ALGORITHMS:
        for n in (1, 2, 3, 8):
            if not entry.worlds(n) or COLLECTIVES[entry.collective].reduces:
                continue
            for peers in (False, True):
                with World(library, n, peers=peers) as world:
                    if uses_packets(world, Call(entry, n, "float32", 9, **root_of(entry, n))):
                        found.add((entry.collective, entry.name, n))
    assert found >= {(c, name, n) for c, name in PLANS for n in (2, 3, 8)}
    many = {(c, name) for c, name, n in found if n == 8} - set(PLANS)
    assert many == {("all_to_all", "pairwise")}  # its rounds copy inputs, too
    assert {c for c, _, _ in found} <= {"all_gather", "all_to_all", "broadcast"}
    assert 1 not in {n for _, _, n in found}


@pytest.mark.parametrize(("collective", "name"), PLANS)
@pytest.mark.parametrize("peers", [False, True])
def test_bytes(library, collective, name, peers):
    """Odd sizes, elements of all sizes, places that are not aligned, in place, interleavings."""
    entry = find(collective, name)
    dtypes = ["float32", "int8", "bfloat16", "float64", "float8_e4m3fn", "uint8"]
    for n in range(2, 10):
        with World(library, n, peers=peers) as world:
            calls = [
                Call(
                    entry,
                    n,
                    dtypes[(n + i) % 6],
                    length,
                    offset=i % 3,
                    in_place=i % 2 == 0,
                    salt=i,
                    **root_of(entry, n),
                )
                for i, length in enumerate((1, 2, 7, 33, 130))
            ]
            assert all(uses_packets(world, call) for call in calls)
            run(library, world, calls, seed=n, lanes=1 + n % 2, blocks=1 + n % 3)


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("epoch", [0, 65529])
def test_among_calls_of_other_kinds(library, peers, epoch):
    """Folds in packets have the same slots; flags pass zero near the wrap-around of the epoch."""
    n = 3
    entries = [find(*plan) for plan in PLANS]
    entries += [find("all_reduce", "one_shot"), find("all_gather", "ring")]
    for seed in range(4):
        with World(library, n, peers=peers) as world:
            world.each("group_set_epoch", epoch)
            library.schedule(seed)
            calls = []
            for i in range(24):
                entry = entries[(i * (seed + 2)) % len(entries)]
                call = Call(entry, n, "float32", 1 + 37 * i % 90, salt=i, **root_of(entry, n))
                calls.append(call)
                packets = entry.name != "ring"
                method = (LOW_LATENCY, INTERPRET)[(i + seed) % 3 == 2] if packets else 0
                form = {"blocks": 1 + (i + seed) % 3, "lanes": 1 + i % 2, "method": method}
                world.launch(world.call(call.specs), call.ins, call.outs, **form)
            world.synchronize()
            assert world.failed() == []
            for call in calls:
                call.check()


def test_interleavings(library):
    """A root sends ahead of receivers that are a call behind, and halves are seen apart."""
    for seed in range(40):
        n = 2 + seed % 3
        with World(library, n, peers=True) as world:
            entries = [find(*PLANS[(seed + i) % len(PLANS)]) for i in range(5)]
            calls = [
                Call(entry, n, "float32", 5 + 3 * i, salt=i, **root_of(entry, n))
                for i, entry in enumerate(entries)
            ]
            run(library, world, calls, seed, blocks=1 + seed % 2, lanes=1)


def test_lanes_as_threads(library):
    for i, plan in enumerate(PLANS):
        n = 2 + i % 3
        with World(library, n, peers=i % 2 == 0) as world:
            entry = find(*plan)
            calls = [
                Call(entry, n, "float32", 100 + k, salt=k, **root_of(entry, n)) for k in range(5)
            ]
            run(library, world, calls, seed=-1, timeout_ms=60_000)


def test_the_size_decides(library):
    for collective, name in PLANS:
        for n in (2, 3, 8):
            entry = find(collective, name)
            blocks = COLLECTIVES[collective].in_layout == OWN or collective == "all_to_all"
            most = MOST // 4 // (n - 1)  # elements of what goes to one rank
            with World(library, n, peers=n == 3) as world:
                for more, chosen in ((0, True), (1, False)):
                    length = most + more if blocks else most // n + more
                    call = Call(entry, n, "float32", length, **root_of(entry, n))
                    assert uses_packets(world, call) == chosen


def test_calls_that_do_not_match(library):
    """Another size, another root: named, whoever comes first."""
    n = 3
    broadcast = find("broadcast", "direct")

    def specs(count, root):
        plans = plans_of(broadcast, n, root=root)
        return [spec_of(plan, "float32", count=count, descriptor=root) for plan in plans]

    for other in ((48, 0), (64, 1)):
        for seed in range(6):
            given = [specs(64, 0) if rank else specs(*other) for rank in range(n)]
            named = mismatches(library, given, seed)
            assert named
            assert all(0 in (record.rank, record.peer) for record in named)


def test_where_packets_cannot_be_sent_they_are_refused(library):
    for n, entry, length in ((4, find("all_gather", "ring"), 8), (8, PUSH, 20_000)):
        is_refused(library, entry, n, length)
