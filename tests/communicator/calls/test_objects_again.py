"""Calls on objects like earlier ones, which the extension serves; and others in between."""

import gc
import random
import signal

import numpy as np
import pytest

import pycoll
from pycoll.errors import ArgumentError, CollError, MismatchError, PeerRejected
from pycoll.runtime.calls.parts import objects
from pycoll.runtime.calls.parts.exchange import gathers
from pycoll.testing import run_processes, run_threads
from pycoll.types import Kind


def once(comm):
    """Make each kind of call, so that the extension knows it."""
    for root in range(comm.world_size):
        comm.broadcast_object(0, root)
        comm.gather_object(0, root)
        comm.scatter_object([0] * comm.world_size, root)
    comm.all_gather_object(0)
    comm.all_to_all_object([0] * comm.world_size)


class Told(Exception):
    pass


class Wicked:
    """What runs code while it becomes bytes."""

    def __init__(self, run):
        self.run = run

    def __reduce__(self):
        self.run()
        return str, ("packed",)


class Curious:
    """What looks at every list of the process while it is read."""

    def __init__(self):
        self.lists = 0

    def __setstate__(self, state):
        self.lists = sum(len(list(x)) >= 0 for x in gc.get_objects() if type(x) is list)


def an_object(rng):
    return rng.choice(
        [
            None,
            rng.random(),
            "x" * rng.choice([0, 5, 400, 493, 494, 495, 496, 497, 600, 5000]),
            {"a": [1, 2, {"b": (3, "4")}]},
            np.arange(rng.choice([0, 3, 500]), dtype=rng.choice(["i4", "f8"])),
        ]
    )


def plain(x):
    return (x.dtype.str, x.tolist()) if isinstance(x, np.ndarray) else x


def same(found, expected):
    return plain(found) == plain(expected)


def many(comm, seed):
    rng = random.Random(seed)
    for _ in range(60):
        kind, root, trusted = rng.randrange(6), rng.randrange(comm.world_size), rng.random() < 0.3
        objects = [an_object(rng) for _ in range(comm.world_size)]
        mine, choice = objects[comm.rank], rng.choice([list, tuple])
        if kind == 0:
            assert same(comm.broadcast_object(mine, root, pickle=trusted), objects[root])
        elif kind == 1:
            found = comm.all_gather_object(mine, pickle=trusted)
            assert all(map(same, found, objects))
        elif kind == 2:
            found = comm.gather_object(mine, root, pickle=trusted)
            assert all(map(same, found, objects)) if comm.rank == root else found is None
        elif kind == 3:
            mine = choice(objects) if comm.rank == root else None
            assert same(comm.scatter_object(mine, root, pickle=trusted), objects[comm.rank])
        elif kind == 4:
            table = [[an_object(rng) for _ in objects] for _ in objects]
            found = comm.all_to_all_object(table[comm.rank], pickle=trusted)
            assert all(map(same, found, [row[comm.rank] for row in table]))
        else:
            comm.all_reduce(np.ones(3), async_op=True)
    return True


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_random_objects(n):
    for seed in range(3):
        assert run_threads(n, lambda comm, seed=seed: many(comm, seed)) == [True] * n


def test_random_objects_between_processes():
    assert run_processes(2, lambda comm: many(comm, 7)) == [True] * 2


def test_small_ones_run_in_the_extension(monkeypatch):
    def ranks(comm):
        once(comm)
        with monkeypatch.context() as changed:
            for name in ("gather", "broadcast", "scatter", "all_to_all"):
                changed.setattr(objects, name, None)
            found = comm.all_gather_object(1), comm.gather_object(2), comm.broadcast_object(3)
            found += comm.scatter_object([4]), comm.all_to_all_object([5])
            return *found, comm.all_gather_object("x" * 1000) == ["x" * 1000]

    assert run_threads(1, ranks) == [([1], [2], 3, 4, [5], True)]


def refused(comm):
    once(comm)
    seen = []
    for call in (
        lambda x: comm.broadcast_object(x, 1),
        lambda x: comm.all_gather_object(x),
        lambda x: comm.gather_object(x),
        lambda x: comm.scatter_object([1, x], 1),
        lambda x: comm.all_to_all_object([1, x]),
    ):
        with pytest.raises((ArgumentError, PeerRejected), match="range") as found:
            call(range(3) if comm.rank == 1 else 1)
        seen.append(type(found.value).__name__)
    return seen, comm.all_gather_object(comm.rank)


def test_what_cannot_be_sent_is_an_error_on_every_rank():
    peer, own = (["PeerRejected"] * 5, [0, 1]), (["ArgumentError"] * 5, [0, 1])
    assert run_threads(2, refused) == [peer, own]


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.gather_object(1, root=comm.rank),
        lambda comm: comm.broadcast_object(1, root=comm.rank),
        lambda comm: comm.scatter_object([1, 2], root=comm.rank),
        lambda comm: comm.scatter_object([1, 2]) if comm.rank else comm.all_to_all_object([1, 2]),
        lambda comm: comm.gather_object(1) if comm.rank else comm.all_gather_object(1),
    ],
)
def test_other_roots_and_other_calls_are_told(call):
    def ranks(comm):
        once(comm)
        with pytest.raises(MismatchError, match=r"(gather|broadcast|scatter)_object"):
            call(comm)
        return True

    assert run_threads(2, ranks) == [True] * 2


def test_a_pickle_is_read_only_where_it_is_trusted():
    def ranks(comm):
        once(comm)
        try:
            comm.all_gather_object(1, pickle=comm.rank == 0)
            found = "read"
        except ArgumentError as error:
            found = "rank 0 sent a pickle" in str(error)
        return found, comm.all_gather_object(comm.rank)

    assert run_threads(2, ranks) == [("read", [0, 1]), (True, [0, 1])]


def test_what_an_object_does_while_it_is_packed():
    def raises():
        raise Told("no")

    def ranks(comm):
        once(comm)
        with pytest.raises((Told, PeerRejected), match="no"):
            comm.all_gather_object(Wicked(raises) if comm.rank else 1, pickle=True)
        nested = Wicked(lambda: comm.all_gather_object(comm.rank))
        assert comm.all_gather_object(nested, pickle=True) == ["packed"] * 2
        with pytest.raises(CollError):
            comm.all_gather_object(Wicked(comm.close) if comm.rank else 1, pickle=True)
        return True

    assert run_threads(2, ranks) == [True] * 2


def test_a_list_that_changes_while_it_is_packed():
    def ranks(comm):
        xs = [1] * 2
        if comm.rank == 1:
            xs[0] = Wicked(xs.clear)
        return comm.all_to_all_object(xs, pickle=True), comm.all_gather_object(comm.rank)

    assert run_threads(2, ranks) == [([1, "packed"], [0, 1]), ([1, 1], [0, 1])]


def test_the_root_keeps_what_it_had_in_its_list():
    def ranks(comm):
        found = []
        for _ in range(2):  # in Python code, and in the extension
            xs = ["own", 0]
            if comm.rank == 0:
                xs[1] = Wicked(xs.clear)
            found.append(comm.scatter_object(xs, pickle=True))
        return found

    assert run_threads(2, ranks) == [["own"] * 2, ["packed"] * 2]


def test_what_is_read_sees_no_list_that_is_half_made():
    def ranks(comm):
        once(comm)
        return [x.lists > 0 for x in comm.all_gather_object(Curious(), pickle=True)]

    assert run_processes(2, ranks) == [[True] * 2] * 2


def test_the_exception_of_a_signal_handler_while_an_object_is_packed():
    def late(*_):
        raise Told("late")

    def ranks(comm):
        once(comm)
        packed = []

        def comes():
            packed.append(1)
            if len(packed) == 1:
                signal.raise_signal(signal.SIGUSR2)

        signal.signal(signal.SIGUSR2, late)
        with pytest.raises(Told if comm.rank else PeerRejected, match="late"):
            comm.all_gather_object(Wicked(comes) if comm.rank else 1, pickle=True)
        return len(packed), comm.all_gather_object(comm.rank)

    assert run_processes(2, ranks) == [(0, [0, 1]), (1, [0, 1])]


def test_no_memory_for_what_comes_on_one_rank():
    def ranks(comm):
        session = comm._session
        call = gathers(session, Kind.ALL_GATHER_V, 64).runs
        nbytes = 1 << 60 if comm.rank else 128
        with pytest.raises(MemoryError if comm.rank else PeerRejected):
            session.fast.on_bytes(call, bytes(64), nbytes, session.site(), 5.0)
        return comm.all_gather_object(comm.rank)

    assert run_threads(2, ranks) == [[0, 1]] * 2


def test_no_memory_for_large_objects_on_one_rank(monkeypatch):
    def no_memory(data):
        raise MemoryError("no more")

    def ranks(comm):
        once(comm)
        if comm.rank == 1:
            monkeypatch.setattr(objects, "_joined", no_memory)
        large = ["x" * 1000] * 2
        for call in (comm.all_to_all_object, lambda x: comm.scatter_object(x, 1)):
            with pytest.raises(PeerRejected if comm.rank == 0 else MemoryError, match="no more"):
                call(large)
        return comm.all_gather_object(comm.rank)

    assert run_processes(2, ranks) == [[0, 1]] * 2


def test_an_interrupt_while_an_object_is_packed():
    def interrupts():
        raise KeyboardInterrupt

    def ranks(comm):
        once(comm)
        with pytest.raises((KeyboardInterrupt, pycoll.Revoked)) as found:
            comm.all_gather_object(Wicked(interrupts) if comm.rank else 1, pickle=True)
        return type(found.value).__name__

    assert run_threads(2, ranks) == ["Revoked", "KeyboardInterrupt"]
