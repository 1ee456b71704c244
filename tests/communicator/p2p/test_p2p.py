"""Tagged messages between two ranks."""

import time

import numpy as np
import pytest

import pycoll
from pycoll.config import Config
from pycoll.errors import ArgumentError, CollTimeout, MismatchError
from pycoll.testing import run_processes, run_threads


def pattern(size, seed, dtype=np.int64):
    return (np.arange(size) * (seed + 3) + seed).astype(dtype)


@pytest.mark.parametrize("size", [0, 1, 5, 1000, 65_537, 1_000_003])
def test_a_message_of_any_size(run, size):
    def rank(comm):
        x = np.empty(size, np.int64)
        if comm.rank == 0:
            comm.send(pattern(size, 1), 1)
            return comm.recv(x, 1) == 1 and bool((x == pattern(size, 2)).all())
        source = comm.recv(x, 0)
        comm.send(pattern(size, 2), 0)
        return source == 0 and bool((x == pattern(size, 1)).all())

    assert run(2, rank) == [True, True]


def test_every_rank_sends_to_its_neighbour_at_once(run):
    def rank(comm):
        n, me = comm.world_size, comm.rank
        x = np.empty(300_000, np.int32)
        comm.send(pattern(len(x), me, np.int32), (me + 1) % n)
        comm.recv(x, (me - 1) % n)
        return bool((x == pattern(len(x), (me - 1) % n, np.int32)).all())

    assert run(3, rank) == [True] * 3


def test_a_tag_finds_its_message_in_any_order(run):
    def rank(comm):
        tags = [5, 0, 2**31 - 1, 7]
        if comm.rank == 0:
            for tag in tags:
                comm.send(np.full(3, tag), 1, tag=tag)
            return tags
        x = np.empty(3, int)
        return [(comm.recv(x, 0, tag=tag), x.tolist()) for tag in reversed(tags)]

    results = run(2, rank)
    assert results[1] == [(0, [tag] * 3) for tag in reversed(results[0])]


def test_messages_of_one_tag_stay_in_order(run):
    def rank(comm):
        x = np.empty(1, int)
        if comm.rank == 0:
            for i in range(500):
                comm.send(np.array([i]), 1, tag=i % 2)
            return None
        return [(comm.recv(x, 0, tag=i % 2), int(x[0]))[1] for i in range(500)]

    assert run(2, rank)[1] == list(range(500))


def test_from_any_source(run):
    def rank(comm):
        if comm.rank:
            comm.send(np.full(2000, comm.rank), 0, tag=1)
            return None
        x = np.empty(2000, int)
        return [(comm.recv(x, pycoll.ANY, tag=1), int(x[0]), int(x[-1])) for _ in range(3)]

    assert sorted(run(4, rank)[0]) == [(r, r, r) for r in (1, 2, 3)]


def test_to_oneself(run):
    def rank(comm):
        x = np.empty(4, int)
        comm.send(pattern(4, comm.rank), comm.rank)
        return comm.recv(x, comm.rank) == comm.rank and x.tolist()

    assert run(2, rank) == [pattern(4, r).tolist() for r in range(2)]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.float64(0), r"x is a float64 whose memory cannot be written"),
        (np.ones(16)[::4], r"x is not C-contiguous"),
        (np.broadcast_to(np.ones(1), (1,)), r"x is read-only"),
    ],
    ids=["scalar", "strided", "read-only"],
)
def test_what_nothing_can_be_received_into(run, x, text):
    def rank(comm):
        with pytest.raises(ArgumentError, match=text):
            comm.recv(x, 0)
        return comm.all_reduce(np.ones(1))[0]

    assert run(2, rank) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("sent", "wanted", "text"),
    [
        (np.ones(10), np.ones(100_000), r"expects 800000 bytes of float64; rank 1 sent 80 .*64\."),
        (np.ones(2, "c8"), np.ones(2), r"expects 16 bytes of float64; rank 1 sent .* complex64\."),
        (np.ones(2, "u1"), np.ones(2, bool), r"expects 2 bytes of bool; rank 1 sent .* uint8\."),
        (np.ones(2, "u1"), np.ones(2), r"sent 2 bytes of uint8\..* into a fitting array$"),
        (np.ones(2, "i4,f4"), np.ones(2, "f4,i4"), r"16 bytes of dtype#\d+; .*16 .* dtype#\d+\."),
    ],
)
def test_another_message_is_told_by_its_name(run, sent, wanted, text):
    def rank(comm):
        if comm.rank:
            comm.send(sent, 0)
            return True
        with pytest.raises(MismatchError, match=text):
            comm.recv(wanted, 1)
        return comm.recv(np.empty_like(sent), 1) == 1

    assert run(2, rank) == [True, True]


def test_any_array(run):
    def rank(comm):
        grid = np.arange(12.0).reshape(3, 4)
        if comm.rank == 0:
            comm.send(grid.T[::-1], 1)
            comm.send(np.float32(3.5), 1, tag=1)
            comm.send(bytearray(b"abc"), 1, tag=2)
            comm.send(np.array([True, False]), 1, tag=3)
            return None
        got, scalar = comm.empty((4, 3), np.float64), np.empty((), np.float32)
        text, flags = bytearray(3), np.empty(2, bool)
        for tag, x in enumerate((got, scalar, text, flags)):
            comm.recv(x, 0, tag=tag)
        return got.tolist() == grid.T[::-1].tolist(), float(scalar), bytes(text), flags.tolist()

    assert run(2, rank)[1] == (True, 3.5, b"abc", [True, False])


def test_the_sender_may_change_its_array_at_once(run):
    def rank(comm):
        x = np.full(200_000, comm.rank, np.int16)
        if comm.rank == 0:
            comm.send(x, 1)
            x[:] = -1
            comm.barrier()
            return True
        time.sleep(0.1)
        comm.recv(x, 0)
        comm.barrier()
        return bool((x == 0).all())

    assert run(2, rank) == [True, True]


@pytest.mark.parametrize(
    "wrong",
    [np.empty(3, np.float32), np.empty(3, np.int32), np.empty(2), np.empty(4)],
    ids=lambda x: f"{x.dtype}-{x.size}",
)
def test_a_message_of_another_kind_stays(run, wrong):
    def rank(comm):
        if comm.rank == 0:
            comm.send(np.arange(3.0), 1)
            return True
        with pytest.raises(MismatchError):
            comm.recv(wrong, 0)
        x = np.empty(3)
        return comm.recv(x, 0) == 0 and x.tolist() == [0.0, 1.0, 2.0]

    assert run(2, rank) == [True, True]


def test_nothing_is_lost_by_a_timeout(run):
    def rank(comm):
        x = np.empty(3)
        if comm.rank == 1:
            with pytest.raises(CollTimeout):
                comm.recv(x, 0, timeout=0.1)
            comm.barrier()
            return comm.recv(x, 0) == 0 and x.tolist()
        comm.barrier()
        comm.send(np.ones(3), 1)
        return x.size

    assert run(2, rank) == [3, [1.0] * 3]


def test_messages_between_collectives(run):
    def rank(comm):
        other, x = 1 - comm.rank, np.empty(10, int)
        comm.send(pattern(10, comm.rank), other, tag=9)
        total = comm.all_reduce(np.ones(50_000))
        comm.recv(x, other, tag=9)
        return float(total.sum()), x.tolist()

    assert run(2, rank) == [(100_000.0, pattern(10, 1 - r).tolist()) for r in range(2)]


def test_more_messages_than_room(run):
    def rank(comm):
        x = np.empty(3000)
        if comm.rank == 0:
            for i in range(200):
                comm.send(np.full(3000, float(i)), 1, tag=i % 7)
            return None
        time.sleep(0.1)
        for i in range(200):
            comm.recv(x, 0, tag=i % 7)
            assert (x == i).all()
        return True

    assert run(2, rank) == [None, True]


def test_many_ranks_to_many():
    def rank(comm):
        n, me = comm.world_size, comm.rank
        for peer in range(n):
            comm.send(np.array([me, peer]), peer, tag=4)
        x = np.empty(2, int)
        seen = {(comm.recv(x, pycoll.ANY, tag=4), *x.tolist()) for _ in range(n)}
        return seen == {(peer, peer, me) for peer in range(n)}

    config = Config(timeout_s=20, heap_bytes=1 << 20)
    assert run_threads(16, rank, config=config) == [True] * 16


def test_types_that_are_equal_but_have_other_names():
    def rank(comm):
        for name, src, dst in (("m8[1000ms]", 0, 1), ("m8[s]", 1, 2)):  # 2 has not seen the first
            if comm.rank == src:
                comm.send(np.ones(2, name), dst)
            elif comm.rank == dst:
                comm.recv(np.ones(2, name), src)
        return True

    assert run_processes(3, rank) == [True] * 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda comm: comm.send(np.ones(2), 2), r"dst=2.*0 to 1"),
        (lambda comm: comm.send(np.ones(2), -1), r"dst=-1"),
        (lambda comm: comm.send(np.ones(2), 0.5), r"dst=0.5"),
        (lambda comm: comm.send(np.ones(2), True), r"dst=True"),
        (lambda comm: comm.recv(np.ones(2), -2), r"src=-2; accepted: 0 to 1, or pycoll.ANY"),
        (lambda comm: comm.send(np.ones(2), 0, tag=-1), r"tag=-1"),
        (lambda comm: comm.send(np.ones(2), 0, tag=2**31), r"tag=2147483648"),
        (lambda comm: comm.recv(np.ones(2), 0, tag="a"), r"tag='a'"),
        (
            lambda comm: comm.send(0, np.ones(2)),
            r"dst is an ndarray.*is first: send\(x, dst\)",
        ),
        (lambda comm: comm.recv(np.ones(2), np.ones(2)), r"src is an ndarray.*recv\(x, src\)"),
        (lambda comm: comm.send(np.ones(2), 0, np.ones(2)), r"tag=array"),
        (lambda comm: comm.recv(0), r"into an array, and this is an int: recv\(x, src\)"),
        (lambda comm: comm.recv(np.ones((2, 2)).T, 0), r"contiguous"),
        (lambda comm: comm.recv(b"abc", 0), r"read-only"),
        (lambda comm: comm.send("text", 0), r"a str"),
        (lambda comm: comm.send(np.array([None]), 0), r"Python objects"),
        (lambda comm: comm.recv(np.ones(2), 0, timeout=-1), r"timeout=-1"),
    ],
)
def test_bad_arguments(run, call, text):
    def rank(comm):
        with pytest.raises(ArgumentError, match=text):
            call(comm)
        return float(comm.all_reduce(np.ones(1))[0])

    assert run(2, rank) == [2.0, 2.0]


def test_a_message_with_another_tag_is_named():
    def rank(comm):
        if comm.rank == 0:
            comm.send(np.ones(3), 1, tag=7)
            comm.barrier()
            return True
        with pytest.raises(CollTimeout, match=r"rank 0 waits, with tag 7 and 24 bytes"):
            comm.recv(np.ones(3), timeout=0.2)
        comm.recv(np.ones(3), tag=7)  # it is still there
        with pytest.raises(CollTimeout, match=r"within 0.1 s\n  rank 0: is in barrier"):
            comm.recv(np.ones(3), timeout=0.1)
        comm.barrier()
        return True

    assert run_processes(2, rank) == [True] * 2


@pytest.mark.parametrize("number", [-1, -2, -3])
def test_numbers_of_an_mpi_are_no_sources(run, number):
    def rank(comm):
        x = np.ones(1)
        calls = (lambda: comm.recv(x, number), lambda: comm.irecv(x, number))
        for call in (*calls, lambda: comm.probe(number)):
            with pytest.raises(ArgumentError, match=f"src={number}; accepted: 0 to 0, or pycoll.A"):
                call()
        return True

    assert run(1, rank) == [True]
