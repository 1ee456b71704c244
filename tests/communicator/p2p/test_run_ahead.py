"""Small messages that are sent before their receiver looks for any."""

import time

import numpy as np
import pytest

import pycoll
from pycoll.errors import CollTimeout, Revoked
from pycoll.runtime.sessions import p2p
from pycoll.testing import run_processes, run_threads

KINDS = {
    "array": lambda i: np.full(10, float(i)),
    "strided": lambda i: np.full(20, float(i))[::2],
    "list": lambda i: [float(i)] * 10,
    "number": float,
    "dates": lambda i: np.full(10, i, "M8[s]"),
    "records": lambda i: np.array([(i, i)] * 10, "i4,f8"),
    "16 KiB": lambda i: np.full(2048, float(i)),
}


@pytest.fixture(params=[run_threads, run_processes])
def run(request):
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["barrier", "all_reduce"])
def test_the_receiver_may_be_in_another_call_first(run, kind, call):
    """Whatever it is that is sent; the sender may change it at once."""
    count = 300

    def ranks(comm):
        meet = comm.barrier if call == "barrier" else (lambda: comm.all_reduce(1))
        if comm.rank == 0:
            for i in range(count):
                x = KINDS[kind](i)
                comm.send(x, 1)
                if isinstance(x, np.ndarray):
                    x[:] = np.zeros(1, x.dtype)
            meet()
            comm.send(np.arange(300_000.0), 1, 1)  # it comes behind, whatever way it goes
            return 0
        meet()
        wrong = 0
        for i in range(count):
            wanted = np.asarray(KINDS[kind](i))
            got = np.empty_like(wanted)
            comm.recv(got, 0)
            wrong += not (got == wanted).all()
        large = np.empty(300_000)
        comm.recv(large, 0, 1)
        return wrong + int((large != np.arange(300_000.0)).sum())

    assert run(2, ranks) == [0, 0]


def test_all_send_to_all_before_anybody_receives(run):
    def ranks(comm):
        n, rank = comm.world_size, comm.rank
        for to in range(n):
            for i in range(40):
                comm.send_object((rank, to, i), to)
        comm.barrier()
        found = [[comm.recv_object(source) for _ in range(40)] for source in range(n)]
        return found == [[(source, rank, i) for i in range(40)] for source in range(n)]

    assert run(3, ranks) == [True] * 3


def test_there_is_an_end_to_it(monkeypatch):
    """A receiver that never looks is an error; memory does not grow for ever."""
    monkeypatch.setattr(p2p, "_MOST_AHEAD", 50)

    def ranks(comm):
        if comm.rank:
            with pytest.raises(Revoked):
                comm.barrier(timeout=20)
            return True
        for sent in range(100):
            try:
                comm.send(np.full(3, sent), 1, timeout=0.5)
            except CollTimeout as error:
                return 50 <= sent < 60 and "taken within 0.5 s" in str(error)
        return False

    assert run_processes(2, ranks) == [True, True]


def test_a_program_that_ends_says_what_was_not_received():
    def ranks(comm):
        if comm.rank:
            time.sleep(0.5)
            return "left"
        for i in range(20):
            comm.send(np.full(3, i), 1)
        with pytest.raises(pycoll.PeerLeft, match="a message was not received"):
            comm.close()
        return "said"

    assert run_processes(2, ranks) == ["said", "left"]


def test_messages_that_have_left_are_forgotten(run):
    def ranks(comm):
        most = 0
        for _ in range(6):
            if comm.rank == 0:
                for _ in range(100):
                    comm.send(np.full(3, 1), 1)
                most = max(most, len(comm._session.under_way))
                comm.barrier()
            else:
                comm.barrier()
                for _ in range(100):
                    comm.recv(np.empty(3, int), 0)
            comm.barrier()
        return most

    assert 0 < run(2, ranks)[0] <= 100


def test_two_threads_that_let_go_of_what_has_left():
    """One finds that a message has left, and another one lets go of it first."""

    class Left:
        def done(self):
            ahead.clear()
            return True

    def ranks(comm):
        nonlocal ahead
        if comm.rank == 0:
            ahead = comm._session._ahead
            while not ahead:
                comm.send(np.zeros(1000), 1)
            ahead.appendleft(Left())
            comm.send(np.ones(1000), 1, 1)
            comm.send(np.zeros(1), 1, 2)
        else:
            time.sleep(0.2)
            x = np.zeros(1000)
            comm.recv(np.zeros(1), 0, 2)
            comm.recv(x, 0, 1)
            while comm.iprobe(0) is not None:
                comm.recv(np.zeros(1000), 0)
            return bool((x == 1).all())
        return True

    ahead = None
    assert run_processes(2, ranks) == [True] * 2
