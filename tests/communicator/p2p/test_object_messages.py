"""Python objects as messages in the background: who gets which, and what becomes of the others."""

import datetime
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pycoll
from pycoll.errors import ArgumentError, CollTimeout, CommClosed, MismatchError, PeerLeft
from pycoll.runtime.calls.parts import object_messages
from pycoll.testing import run_processes, run_threads


@pytest.fixture(params=[run_threads, run_processes])
def run(request):
    return request.param


def test_around_the_ring(run):
    def ranks(comm):
        n, rank = comm.world_size, comm.rank
        for size in (0, 1000, 300_000):
            came = comm.irecv_object((rank - 1) % n, 3)
            sent = comm.isend_object({"from": rank, "data": b"x" * size}, (rank + 1) % n, 3)
            assert came.wait() == {"from": (rank - 1) % n, "data": b"x" * size}
            assert came.done()
            assert came.wait() == {"from": (rank - 1) % n, "data": b"x" * size}
            assert sent.wait() is None
        return True

    assert all(run(3, ranks))


@pytest.mark.parametrize("seed", range(6))
def test_each_message_goes_to_the_first_receive_that_it_fits(run, seed):
    def ranks(comm):
        chance = random.Random(seed)
        tags = [chance.randrange(3) for _ in range(30)]
        asked = [(chance.choice([1, pycoll.ANY]), tag) for tag in tags]
        for at in chance.sample(range(30), 6):
            asked[at] = asked[at][0], pycoll.ANY
        if comm.rank == 1:
            sent = [comm.isend_object((number, tag), 0, tag) for number, tag in enumerate(tags)]
            comm.barrier()
            return len(pycoll.wait_all(sent)) == 30
        comm.barrier()  # all messages are there
        expected, free = {}, dict(enumerate(asked))
        for number, tag in enumerate(tags):
            fits = (at for at, (_, wanted) in free.items() if wanted in (tag, pycoll.ANY))
            if (first := next(fits, None)) is not None:
                expected[first] = number, tag
                del free[first]
        works = [comm.irecv_object(*ends) for ends in asked]
        order = sorted(expected)
        chance.shuffle(order)
        assert len(order) > 15
        assert all(works[at].wait() == expected[at] for at in order)
        del works  # those that are left
        others = [comm.recv_object(1, pycoll.ANY) for _ in range(30 - len(order))]
        return sorted([*expected.values(), *others]) == list(enumerate(tags))

    assert run(2, ranks) == [True, True]


def test_what_is_waited_for_in_vain_is_received_later(run):
    def ranks(comm):
        if comm.rank == 0:
            work = comm.irecv_object(1, 7)
            with pytest.raises(CollTimeout, match=r"recv_object on rank 0: nothing from rank 1"):
                work.wait(0.05)
            comm.barrier()
            assert work.wait() == "late"
            behind = comm.irecv_object()
            assert comm.recv_object() == "second"  # the first is for the call before
            assert behind.wait() == "first"
            works = [comm.irecv_object(tag=tag) for tag in range(3)]
            assert pycoll.wait_any(works) == 2
            return works[2].wait() == 2.5
        comm.barrier()
        comm.send_object("late", 0, 7)
        comm.send_object("first", 0)
        comm.send_object("second", 0)
        comm.send_object(2.5, 0, 2)
        return True

    assert run(2, ranks) == [True, True]


def test_a_receive_that_is_dropped_takes_nothing(run):
    def ranks(comm):
        if comm.rank == 0:
            comm.irecv_object(1)
            return comm.recv_object(1)
        comm.send_object("kept", 0)
        return "kept"

    assert run(2, ranks) == ["kept", "kept"]


def test_errors_go_to_the_receive_that_has_them(run):
    def ranks(comm):
        if comm.rank == 0:
            with pytest.raises(ArgumentError, match=r"src=2; accepted: 0 to 1"):
                comm.irecv_object(2)
            with pytest.raises(ArgumentError, match=r"tag=-5; accepted"):
                comm.irecv_object(1, -5)
            with pytest.raises(ArgumentError, match="cannot be sent as data"):
                comm.isend_object(object(), 1)
            pickled, plain, never = comm.irecv_object(1), comm.irecv_object(1), comm.irecv_object(1)
            assert plain.wait() == "plain"
            for _ in range(2):
                with pytest.raises(ArgumentError, match="rank 1 sent a pickle"):
                    pickled.wait()
            with pytest.raises(PeerLeft):
                never.wait()
            assert never.done()
            return True
        comm.send_object(datetime.date(2000, 1, 1), 0, pickle=True)
        comm.send_object("plain", 0)
        comm.close()
        return True

    assert run(2, ranks) == [True, True]


def test_after_close(run):
    def ranks(comm):
        work = comm.irecv_object(0)
        comm.close()
        with pytest.raises(CommClosed):
            work.wait()
        with pytest.raises(CommClosed):
            comm.irecv_object(0)
        return True

    assert run(1, ranks) == [True]


def test_the_object_is_sent_as_it_was(run):
    def ranks(comm):
        if comm.rank == 0:
            x = {"array": np.arange(100_000)}
            work = comm.isend_object(x, 1)
            x["array"][:] = -1
            return work.wait() is None
        return (comm.recv_object(0)["array"] == np.arange(100_000)).all()

    assert run(2, ranks) == [True, True]


def test_threads_that_receive_objects_of_other_sizes():
    def ranks(comm):
        objects = ["x" * (i * 37 % 900) + str(i) for i in range(300)]
        if comm.rank == 0:
            for x in objects:
                comm.send_object(x, 1)
            return True
        with ThreadPoolExecutor(3) as threads:
            found = threads.map(lambda _: comm.recv_object(0), objects)
            return sorted(found) == sorted(objects)

    assert run_processes(2, ranks) == [True, True]


def test_sent_and_received_in_the_extension(monkeypatch):
    def ranks(comm):
        for x in ({"a": 1}, b"x" * 100, "y" * 300_000, np.arange(4)):
            if comm.rank == 0:
                assert np.array_equal(comm.recv_object(1), x)
                comm.send_object((x, 2), 1, 5, pickle=True)
            else:
                comm.send_object(x, 0)
                back, two = comm.recv_object(pycoll.ANY, pycoll.ANY, pickle=True)
                assert np.array_equal(back, x)
                assert two == 2
        return True

    monkeypatch.setattr(object_messages, "recv", None)
    monkeypatch.setattr(object_messages, "send", None)
    assert run_threads(2, ranks) == [True, True]


class Busy:
    """An object that does something when it is packed."""

    def __init__(self, does):
        self.does = does

    def __reduce__(self):
        return str, (self.does(),)


def test_what_an_object_does_while_it_is_packed(run):
    def ranks(comm):
        if comm.rank == 1:
            return [comm.recv_object(0, pickle=True) for _ in range(3)]
        comm.send_object(Busy(lambda: comm.send_object("inner", 1, pickle=True)), 1, pickle=True)
        with pytest.raises(ZeroDivisionError):
            comm.send_object(Busy(lambda: 1 // 0), 1, pickle=True)
        comm.send_object("after it", 1, pickle=True)
        with pytest.raises(CommClosed):
            comm.send_object(Busy(comm.close), 1, pickle=True)
        return None

    assert run(2, ranks) == [None, ["inner", "None", "after it"]]


@pytest.mark.parametrize("data", [[0xC0], [ord("m"), 4], [], range(5)])
def test_bytes_are_not_taken_for_an_object_nor_an_object_for_bytes(run, data):
    sent = np.array(data, np.uint8)

    def ranks(comm):
        if comm.rank == 1:
            comm.send(sent, 0)
            comm.send_object("an object", 0)
            comm.isend_object("another", 0).wait()
            return True
        for receive in (comm.recv_object, lambda: comm.irecv_object().wait()):
            with pytest.raises(
                MismatchError, match=r"expects an object; .* bytes of uint8\. The m"
            ):
                receive()
        came = np.full_like(sent, 255)
        assert comm.recv(came) == 1  # it was kept
        assert came.tolist() == [*data]
        for _ in range(2):
            room = np.zeros(comm.probe().nbytes, np.uint8)
            with pytest.raises(
                MismatchError, match=r"sent an object\. .* receive it with recv_obj"
            ):
                comm.recv(room)
            assert comm.recv_object() in ("an object", "another")
        return True

    assert run(2, ranks) == [True, True]


def test_errors_are_those_of_messages_of_arrays(run):
    def ranks(comm):
        for wrong in ({"dst": 5}, {"dst": 0, "tag": -1}, {"dst": 0.0}, {"dst": 0, "timeout": -1}):
            with pytest.raises(ArgumentError):
                comm.send_object(1, **wrong)
        for wrong in ({"src": 5}, {"src": -1}, {"tag": -7}, {"timeout": "soon"}):
            with pytest.raises(ArgumentError):
                comm.recv_object(**wrong)
        with pytest.raises(ArgumentError, match="range cannot be sent"):
            comm.send_object(range(3), 0)
        with pytest.raises(TypeError, match="dst"):
            comm.send_object(1)
        with pytest.raises(CollTimeout, match=r"recv_object on rank 0: nothing from any rank"):
            comm.recv_object(timeout=0.01)
        comm.send(np.zeros(3), 0)
        with pytest.raises(MismatchError, match="float64"):
            comm.recv_object(timeout=1)
        comm.recv(np.zeros(3), 0)
        comm.send_object(Busy(lambda: "code"), 0, pickle=True)
        with pytest.raises(ArgumentError, match="rank 0 sent a pickle"):
            comm.recv_object()
        return True

    assert run(1, ranks) == [True]
