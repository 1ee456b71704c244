"""Messages in the background: isend, irecv, sendrecv, probe, and waiting for any or all."""

import time
from array import array

import numpy as np
import pytest

import pycoll
from pycoll.errors import ArgumentError, CollTimeout, MismatchError, PeerLeft
from pycoll.testing import run_processes, run_threads


@pytest.fixture(params=[run_threads, run_processes])
def run(request):
    return request.param


def neighbours(comm):
    return (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size


def test_around_the_ring(run):
    def ranks(comm):
        left, right = neighbours(comm)
        for count in (0, 1, 1000, 300_000):
            x, y = np.full(count, comm.rank), np.empty(count, int)
            works = [comm.irecv(y, left, 3), comm.isend(x, right, 3)]
            assert pycoll.wait_all(works, timeout=20) == [left, None]
            assert all(work.done() for work in works)
            assert (y == left).all()
        return True

    assert all(run(3, ranks))


@pytest.mark.parametrize("make", [bytearray, lambda data: array("d", data)])
def test_memory_that_a_message_comes_into_stays_where_it_is(run, make):
    """Python refuses to resize it, as while NumPy looks at it."""

    def ranks(comm):
        left, right = neighbours(comm)
        x = make(bytes(80))
        coming = comm.irecv(x, left)
        with pytest.raises(BufferError):
            x.extend(x)
        comm.isend(make(bytes([comm.rank]) * 80), right).wait()
        coming.wait()
        x.extend(x)
        return bytes(x) == bytes([left]) * 160

    assert all(run(2, ranks))


def test_what_came_before_is_not_lost(run):
    """A message that a blocking call has put aside is there for calls in the background."""

    def ranks(comm):
        left, right = neighbours(comm)
        comm.send(np.array([comm.rank]), right, 1)
        comm.send(2.5, right, 2)
        last, first = np.empty(()), np.empty(1, int)
        comm.recv(last, left, 2)
        work = comm.irecv(first, left, 1)
        return work.wait() == left and first[0] == left and float(last) == 2.5

    assert all(run(3, ranks))


def test_shifts(run):
    def ranks(comm):
        left, right = neighbours(comm)
        for count in (1, 1000, 200_000):
            x, y = np.full(count, float(comm.rank)), np.empty(count)
            assert comm.sendrecv(x, right, y, left, timeout=20) == left
            assert (y == left).all()
            comm.sendrecv(x, right, x, left, tag=comm.rank, recv_tag=left)
            assert (x == left).all()
        return True

    assert all(run(3, ranks))


@pytest.mark.parametrize(
    ("x", "part"),
    [(np.ones((3, 2))[:, 0], "_post"), (np.ones(1 << 18), "_finish_send")],
    ids=["scattered", "large"],
)
def test_a_failed_send_ends_the_receive(run, x, part):
    """What comes afterwards goes to the next receive, not into the array of the failed call."""

    def ranks(comm):
        if comm.rank == 1:
            comm.barrier()
            comm.send(np.full(3, 7.0), 0)
            if x.size > 3:  # it is on its way
                comm.recv(np.empty_like(x), 0)
            comm.barrier()
            return True

        def fails(*_):
            raise PeerLeft("rank 1 has left")

        out, later = np.zeros(3), np.zeros(3)
        send = getattr(comm._session, part)
        setattr(comm._session, part, fails)
        with pytest.raises(PeerLeft):
            comm.sendrecv(x, 1, out, 1)
        setattr(comm._session, part, send)
        comm.barrier()
        comm.recv(later, 1, timeout=20)
        comm.barrier()
        return out.tolist() == [0] * 3 and later.tolist() == [7] * 3

    assert all(run(2, ranks))


def test_a_look_at_what_comes(run):
    def ranks(comm):
        left, right = neighbours(comm)
        assert comm.iprobe(left, 5) is None
        with pytest.raises(CollTimeout, match=f"probe on rank {comm.rank}: nothing from"):
            comm.probe(tag=5, timeout=0.05)
        with pytest.raises(CollTimeout, match=f"recv on rank {comm.rank}: nothing from any"):
            comm.recv(np.empty(3), tag=pycoll.ANY, timeout=0.05)
        with pytest.raises(CollTimeout, match=f"recv_object on rank {comm.rank}: nothing from"):
            comm.recv_object(left, timeout=0.05)
        comm.barrier()
        comm.send(np.arange(3.0), right, 5)
        seen = comm.probe(timeout=20)
        x = np.empty(seen.nbytes // 8)
        comm.recv(x, seen.src, seen.tag)
        comm.barrier()
        comm.send(7, right, 6)
        number = np.empty((), int)
        sender = comm.recv(number, tag=pycoll.ANY)
        return seen == (left, 5, 24) and x.tolist() == [0, 1, 2] and (sender, number) == (left, 7)

    assert all(run(3, ranks))


def test_any_of_several(run):
    def ranks(comm):
        if comm.rank:
            comm.barrier()
            time.sleep(0.1 * (2 - comm.rank))
            return comm.isend(np.array([comm.rank]), 0).wait()
        boxes = [np.empty(1, int) for _ in range(2)]
        works = [comm.irecv(box, src) for src, box in enumerate(boxes, 1)]
        with pytest.raises(CollTimeout, match="none of 2 calls"):
            pycoll.wait_any(works, timeout=0.05)
        works.append(comm.barrier(async_op=True))
        order = []
        while any(works):
            left = [i for i, work in enumerate(works) if work]
            place = left[pycoll.wait_any([works[i] for i in left], timeout=20)]
            works[place].wait()
            works[place] = None
            order.append(place)
        return order, [int(box[0]) for box in boxes]

    order, got = run(3, ranks)[0]
    assert sorted(order) == [0, 1, 2]
    assert got == [1, 2]
    with pytest.raises(ArgumentError, match="wait_any has been given none"):
        pycoll.wait_any([])


def test_after_a_timeout(run):
    """A receive that gave up leaves its array alone; one in the background goes on."""

    def ranks(comm):
        left, right = neighbours(comm)
        x, y = np.full(40_000, -1.0), np.empty(1)
        later = comm.irecv(y, left, 2)
        with pytest.raises(CollTimeout):
            comm.recv(x, left, 1, timeout=0.02)
        with pytest.raises(CollTimeout):
            later.wait(0.02)
        assert not later.done()
        comm.barrier()
        sent = comm.isend(np.full(40_000, float(comm.rank)), right, 1)
        comm.send(3.5, right, 2)
        assert later.wait() == left
        assert y[0] == 3.5
        assert (x == -1).all()
        comm.recv(x, left, 1)
        sent.wait()
        return (x == left).all()

    assert all(run(2, ranks))


def test_what_does_not_fit():
    def ranks(comm):
        other = 1 - comm.rank
        comm.isend(np.ones(3), other, 1)
        with pytest.raises(MismatchError, match="expects 16 bytes of float64"):
            comm.irecv(np.empty(2), other, 1).wait()
        fitting = np.empty(3)
        comm.recv(fitting, other, 1)
        for wrong in (lambda: comm.irecv([1.0]), lambda: comm.isend(1.0, 2), lambda: comm.probe(5)):
            with pytest.raises(ArgumentError):
                wrong()
        return fitting.tolist()

    assert run_threads(2, ranks) == [[1.0] * 3] * 2


def test_a_peer_that_leaves():
    def ranks(comm):
        if comm.rank == 1:
            comm.close()
            return True
        work = comm.irecv(np.empty(1), 1)
        with pytest.raises(PeerLeft):
            work.wait()
        with pytest.raises(PeerLeft):
            work.wait()
        return work.done()

    assert run_processes(2, ranks) == [True, True]


def test_a_message_without_a_reference_keeps_its_array():
    def ranks(comm):
        if comm.rank:
            comm.barrier()
            x = np.empty(500_000)
            comm.recv(x, 0)
            return (x == 4).all()
        comm.isend(np.full(500_000, 4.0), 1)
        comm.barrier()
        assert len(comm._session.under_way) == 1
        comm.barrier()
        return True

    def second(comm):
        found = ranks(comm)
        if comm.rank:
            comm.barrier()
        return found

    assert all(run_processes(2, second))


def test_each_call_is_told_of_once(run):
    """The works of a farm stay in their list, as requests do in MPI."""

    def ranks(comm):
        if comm.rank == 0:
            boxes = [np.zeros(1) for _ in range(3)]
            works = [comm.irecv(box, 1, tag) for tag, box in enumerate(boxes)]
            first = [pycoll.wait_any(works, timeout=20) for _ in range(3)]
            with pytest.raises(ArgumentError, match="wait_any has told of all 3 before"):
                pycoll.wait_any(works)
            works[first[0]] = None
            works[first[1]] = comm.irecv(boxes[0], 1, 7)
            assert pycoll.wait_any(works, timeout=20) == first[1]
            with pytest.raises(ArgumentError, match="told of all"):
                pycoll.wait_any(works)
            assert all(work is None or work.done() for work in works)
            return sorted(first), [float(box[0]) for box in boxes]
        for tag in (2, 0, 1, 7):
            comm.send(np.full(1, tag + 1.0), 0, tag)
        return None

    assert run(2, ranks)[0] == ([0, 1, 2], [8.0, 2.0, 3.0])


@pytest.mark.parametrize("wait", [pycoll.wait_all, pycoll.wait_any])
def test_what_is_no_call_is_named(run, wait):
    def ranks(comm):
        x, work = np.ones(3), comm.all_reduce(np.ones(3), async_op=True)
        with pytest.raises(ArgumentError, match="number 1 is an ndarray, and no call in the back"):
            wait([work, comm.all_reduce(x)])
        with pytest.raises(ArgumentError, match="one call was given, not a list"):
            wait(work)
        return work.wait()[0]

    assert run(2, ranks) == [2.0, 2.0]


def test_none_is_for_wait_any_alone(run):
    def ranks(comm):
        with pytest.raises(ArgumentError, match="number 0 is a NoneType"):
            pycoll.wait_all([None])
        return pycoll.wait_any([None, comm.barrier(async_op=True)], timeout=20)

    assert run(2, ranks) == [1, 1]


def test_many_receives_in_any_order(run):
    def ranks(comm):
        left, right = neighbours(comm)
        order = np.random.default_rng(1).permutation(1000)
        into = np.zeros((1000, 2), int)
        works = [comm.irecv(into[i], left if i % 3 else pycoll.ANY, i) for i in range(1000)]
        for i in order:
            comm.send(np.full(2, i), right, int(i))
        pycoll.wait_all(works, timeout=20)
        return bool((into[:, 0] == np.arange(1000)).all())

    assert all(run(3, ranks))
