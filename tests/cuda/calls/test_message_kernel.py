"""Messages between two ranks, compiled for the host: bytes, places used again, failures."""

import numpy as np
import pytest

from cuda.calls.test_device import Call
from device_library import (
    ARGUMENT,
    FOLLOWED,
    TIMEOUT,
    TOO_LARGE,
    DeviceError,
    Library,
    World,
    host_library,
)
from pycoll.algorithms import find

PLACES = 64  # parts from one rank to another that are not taken yet
ROOM, MESSAGE, RECEIVER = 0xFFFFFFFC, 0xFFFFFFFD, 0xFFFFFFFE  # what ranks wait for


@pytest.fixture(scope="module")
def library():
    return Library(host_library())


def slot(n):
    """Return the bytes of a slot."""
    return (4 << 20) // (PLACES * n) // 128 * 128


class Pair:
    """Messages between two ranks of a world, with arrays that begin anywhere."""

    def __init__(self, world, rng, src=0, dst=1):
        self.world, self.rng, self.src, self.dst = world, rng, src, dst
        self.number, self.kept = 0, []

    def bytes_of(self, nbytes):
        """Return random bytes at a random place."""
        first = int(self.rng.integers(0, 20))
        return self.rng.integers(0, 256, nbytes + first).astype(np.uint8)[first:]

    def message(self, nbytes, *, slotted, awaits=False, streams=(1, 1), send=True, receive=True):
        """Queue both sides of a message; return what is sent and where it arrives."""
        x, y = self.bytes_of(nbytes), self.bytes_of(nbytes)
        form = {"slotted": slotted, "blocks": int(self.rng.integers(1, 4)), "lanes": 2}
        if send:
            self.world.message(
                "send", self.src, self.dst, self.number, x, awaits=awaits, stream=streams[0], **form
            )
        if receive:
            form |= {"source": None if slotted else x, "stream": streams[1]}
            self.world.message("receive", self.dst, self.src, self.number, y, **form)
        self.kept.append((x, y, receive))
        self.number += self.world.parts(nbytes, slotted)
        return x, y

    def check(self):
        for x, y, received in self.kept:
            assert not received or np.array_equal(x, y)


@pytest.mark.parametrize("slotted", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_bytes(library, slotted, seed):
    """Sizes around those of parts, alignments, interleavings."""
    rng, n = np.random.default_rng(seed), 2 + seed % 2
    library.schedule(seed)
    with World(library, n, peers=True) as world:
        pair = Pair(world, rng, src=seed % n, dst=(seed + 1) % n)
        for nbytes in (0, 1, 15, 16, 17, 127, 4096, 33_333):
            pair.message(nbytes, slotted=slotted, awaits=not slotted)
        world.synchronize()
        assert world.failed() == []
        pair.check()


def test_a_message_of_many_parts(library):
    """More slots than there are: the sender waits for room again and again."""
    library.schedule(3)
    n = 32
    with World(library, n, peers=True) as world:
        pair = Pair(world, np.random.default_rng(0))
        for parts in (PLACES, 2 * PLACES + 3):
            pair.message(parts * slot(n) - 5, slotted=True, streams=(1, 2))
        assert pair.number == 3 * PLACES + 3
        world.synchronize()
        assert world.failed() == []
        pair.check()


@pytest.mark.parametrize("seed", range(4))
def test_places_are_used_again(library, seed):
    """More messages than places, of both ways, on several streams, received in any order."""
    rng = np.random.default_rng(seed)
    library.schedule(seed)
    with World(library, 2, peers=True) as world:
        pair, back = Pair(world, rng), Pair(world, rng, src=1, dst=0)
        for turn in range(3 * PLACES):
            slotted = bool(rng.integers(2))
            pair.message(int(rng.integers(200)), slotted=slotted, streams=(1, 2))
            if turn % 5 == 0:
                back.message(int(rng.integers(200)), slotted=not slotted, streams=(3, 4))
        world.synchronize()
        assert world.failed() == []
        pair.check()
        back.check()


@pytest.mark.parametrize("slotted", [False, True])
def test_messages_are_received_in_any_order(library, slotted):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        library.schedule(seed)
        with World(library, 2, peers=True) as world:
            pair, n = Pair(world, rng), 12
            sent = [pair.bytes_of(50 + i) for i in range(n)]
            got = [pair.bytes_of(50 + i) for i in range(n)]
            for i in rng.permutation(n).tolist():  # a stream of the sender each, or nearly
                world.message("send", 0, 1, i, sent[i], slotted=slotted, stream=1 + i % 9)
            for i in rng.permutation(n).tolist():
                source = None if slotted else sent[i]
                world.message("receive", 1, 0, i, got[i], slotted=slotted, source=source)
            world.synchronize()
            assert world.failed() == []
            assert all(np.array_equal(a, b) for a, b in zip(sent, got, strict=True))


def test_a_rank_sends_to_itself(library):
    library.schedule(1)
    with World(library, 2, peers=True) as world:
        pair = Pair(world, np.random.default_rng(0), src=1, dst=1)
        for slotted in (True, False):
            pair.message(500, slotted=slotted)
        world.synchronize()
        assert world.failed() == []
        pair.check()


@pytest.mark.parametrize("slotted", [False, True])
def test_the_sender_knows_when_a_message_is_taken(library, slotted):
    library.schedule(2)
    with World(library, 2, peers=True) as world:
        pair = Pair(world, np.random.default_rng(0))
        x, y = pair.message(70_000, slotted=slotted, receive=False)
        world.synchronize()
        assert not world.taken(0, 1, 0, x, slotted)
        source = None if slotted else x
        world.message("receive", 1, 0, 0, y, slotted=slotted, source=source)
        world.message("send", 0, 1, 0, x, slotted=slotted, posts=False, awaits=True)
        world.synchronize()
        assert world.taken(0, 1, 0, x, slotted)
        assert world.failed() == []
        assert np.array_equal(x, y)


def test_as_many_blocks_as_a_group_has(library):
    """A message has more parts than its group has blocks; by default it takes what there is."""
    library.schedule(0)
    with World(library, 2, peers=True, max_blocks=3) as world:
        rng, nbytes = np.random.default_rng(0), 5 * slot(2)
        x, y = rng.integers(0, 256, nbytes).astype(np.uint8), np.zeros(nbytes, np.uint8)
        world.message("send", 0, 1, 0, x, slotted=True, blocks=0)
        world.message("receive", 1, 0, 0, y, slotted=True, blocks=0)
        world.synchronize()
        assert world.failed() == []
        assert np.array_equal(x, y)
    with World(library, 2, peers=True, max_blocks=256) as world:
        with pytest.raises(DeviceError, match="fit at once") as caught:
            world.message("send", 0, 1, 0, x, slotted=True, blocks=200)
        assert caught.value.status == TOO_LARGE


def test_between_calls_of_the_same_ranks(library):
    """Messages change nothing for collectives."""
    for seed in range(3):
        library.schedule(seed)
        with World(library, 2, peers=True) as world:
            pair = Pair(world, np.random.default_rng(seed))
            calls = [Call(find("all_reduce", "ring"), 2, "float32", 40, salt=i) for i in range(4)]
            for call in calls:
                world.launch(world.call(call.specs), call.ins, call.outs)
                pair.message(300, slotted=seed % 2 == 0)
            world.synchronize()
            assert world.failed() == []
            pair.check()
            for call in calls:
                call.check()


@pytest.mark.parametrize(
    ("send", "receive", "awaits", "why"),
    [(False, True, False, MESSAGE), (True, False, True, RECEIVER)],
)
@pytest.mark.parametrize("slotted", [False, True])
def test_a_side_that_does_not_come(library, send, receive, awaits, why, slotted):
    library.schedule(1)
    with World(library, 3, peers=True) as world:
        pair = Pair(world, np.random.default_rng(0), src=2, dst=1)
        pair.message(100, slotted=slotted, send=send, receive=receive, awaits=awaits)
        world.synchronize()
        waiting, missing = (1, 2) if receive else (2, 1)
        assert world.failed() == [waiting]
        record = world.error(waiting)
        assert (record.kind, record.peer, record.instruction) == (TIMEOUT, missing, why)
        pair.message(100, slotted=slotted)  # all ranks leave from then on
        world.synchronize()
        assert world.error(missing).kind == FOLLOWED


def test_no_room(library):
    library.schedule(1)
    with World(library, 2, peers=True) as world:
        pair = Pair(world, np.random.default_rng(0))
        for _ in range(PLACES + 1):
            pair.message(8, slotted=True, receive=False)
        world.synchronize()
        record = world.error(0)
        assert (record.kind, record.peer, record.instruction) == (TIMEOUT, 1, ROOM)
        assert world.failed() == [0]


def test_an_abort_ends_a_wait(library):
    library.schedule(1)
    with World(library, 2, peers=True) as world:
        pair = Pair(world, np.random.default_rng(0))
        world.library.group_abort(world.groups[1])
        with pytest.raises(DeviceError, match="the group was aborted"):
            pair.message(8, slotted=True, send=False)


def test_what_is_refused(library):
    with World(library, 2, peers=True) as world:
        x = np.zeros(64, np.uint8)
        for options, text in (
            ({"peer": 2}, "rank 2 of 2"),
            ({"lanes": 99}, "threads per block"),
            ({"blocks": 99}, "blocks"),
        ):
            form = {"peer": 1, "slotted": True, **options}
            with pytest.raises(DeviceError, match=text) as caught:
                world.message("send", 0, form.pop("peer"), 0, x, **form)
            assert caught.value.status == ARGUMENT
    with World(library, 2) as world, pytest.raises(DeviceError, match="ranks of their own"):
        world.message("send", 0, 1, 0, x, slotted=True)


def test_lanes_as_threads(library):
    library.schedule(-1)
    with World(library, 3, peers=True) as world:
        pairs = [Pair(world, np.random.default_rng(i), i, (i + 1) % 3) for i in range(3)]
        for turn in range(6):
            for pair in pairs:
                slotted = turn % 2 == 0
                pair.message(5000 * turn, slotted=slotted, awaits=not slotted, streams=(1, 2))
        world.synchronize()
        assert world.failed() == []
        for pair in pairs:
            pair.check()
