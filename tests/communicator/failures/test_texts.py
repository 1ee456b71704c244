"""Texts of the program that reach other ranks: of exceptions, reasons, and names of files."""

import contextlib
import os
import threading
import time
from functools import partial

import numpy as np
import pytest

import chaos
from pycoll.config import Config
from pycoll.errors import CollError, CollTimeout, MismatchError, PeerLeft, PeerRejected, Revoked
from pycoll.runtime.sessions.reports import each_says, what_others_do
from pycoll.testing import run_processes, run_threads

X = np.ones(10)


class _Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")


TEXTS = {
    "no text": (_Odd, "_Odd: (no text, for its __str__ raised RuntimeError)"),
    "a name of a file that is no UTF-8": (lambda: OSError("caf\udce9"), r"OSError: caf\udce9"),
    "nothing": (MemoryError, "MemoryError."),
}


@pytest.mark.parametrize("text", TEXTS)
def test_any_exception_reaches_the_peers(run, text):
    make, told = TEXTS[text]

    class Array:
        @property
        def __array_interface__(self):
            raise make()

    def rank(comm):
        twin, third = comm.dup(), comm.dup()
        if comm.rank == 0:
            with pytest.raises(type(make())):
                comm.all_reduce(Array())
            with pytest.raises(type(make())), twin:
                raise make()
            third.abort("caf\udce9")
        else:
            with pytest.raises(PeerRejected) as refused:
                comm.all_reduce(X)
            with pytest.raises(PeerLeft) as left:
                twin.barrier()
            with pytest.raises(Revoked, match="udce9"):
                third.barrier()
            assert told.rstrip(".") in str(refused.value)
            assert told in str(left.value)
        return float(comm.all_reduce(X)[0])

    assert run(2, rank) == [2.0, 2.0]


def test_a_text_that_is_too_long_shows_that_it_was_cut(run):
    def rank(comm):
        twin = comm.dup()
        for call, error in ((twin, PeerLeft), (comm, PeerRejected)):
            if comm.rank == 0:
                with pytest.raises(ValueError, match="the end"):
                    _raise_in(
                        call, ValueError("cut \u20ac" + 200 * "\u20ac" + "the end"), call is comm
                    )
            else:
                with pytest.raises(error, match=r"cut \u20ac+ \[\.\.\.\]") as found:
                    call.all_reduce(X)
                assert "the end" not in str(found.value)
        return float(comm.all_reduce(X)[0])

    assert run(2, rank) == [2.0, 2.0]


def _raise_in(comm, error, inside):
    """Leave a communicator by an exception, or raise it while an argument of a call is read."""

    class Array:
        @property
        def __array_interface__(self):
            raise error

    if inside:
        comm.all_reduce(Array())
    with comm:
        raise error


@pytest.mark.parametrize("name", ["pycollage", None])
def test_call_sites_in_modules_of_any_name_and_file(name):
    code = compile("comm.all_reduce(x)", "caf\udce9.py", "exec")

    def rank(comm):
        with pytest.raises(MismatchError) as caught:
            exec(code, {"__name__": name, "comm": comm, "x": np.ones(3 + comm.rank)})
        return str(caught.value).count(r" at caf\udce9.py:1 <module>()")

    assert run_threads(2, rank) == [2, 2]


def test_many_ranks_that_do_the_same_share_a_line():
    """So that the one that differs is not lost among hundreds."""
    n, over = 20, threading.Barrier(20)

    def ranks(comm):
        text = ""
        comm.barrier()
        if comm.rank not in (5, 11):
            with pytest.raises(CollTimeout) as caught:
                comm.barrier(timeout=3)
            text = str(caught.value)
        over.wait(30)
        return text

    for text in filter(None, run_threads(n, ranks)):
        first, odd, *rest = text.splitlines()
        assert "gave up after waiting 3" in first
        assert odd.startswith("  each of ranks 5, 11: has not made this call")
        assert len(rest) < n / 2
        assert any(line.startswith("  each of ranks 0-4, 6-10") for line in rest)


def test_of_few_ranks_each_has_a_line():
    said = {rank: "same" for rank in range(16)}
    assert each_says(said) == [f"  rank {rank}: same" for rank in range(16)]
    assert each_says({**said, 16: "other"}) == ["  rank 16: other", "  each of ranks 0-15: same"]


ENDS = {
    "an exception": (lambda pair: ValueError("the cause"), "rank 0 (process {}) left: {cause}."),
    "an exit": (lambda pair: SystemExit("early."), "rank 0 (process {}) left: {cause}"),
    "an abort": (lambda pair: pair.abort("why"), "rank 0 aborted the communicator (why) ("),
}


@pytest.mark.parametrize("end", ENDS)
def test_of_ranks_that_leave_one_after_the_other_the_first_cause_is_told_once(run, end):
    """Each has a communicator with the next one, where that hears why it leaves."""
    make, told = ENDS[end]

    def rank(comm):
        pairs = [comm.split(0 if comm.rank in (r, r + 1) else None) for r in range(3)]
        text = ""
        with contextlib.suppress(CollError, ValueError, SystemExit), pairs[min(comm.rank, 2)]:
            if comm.rank == 0:
                if (error := make(pairs[0])) is not None:
                    raise error
            else:
                with pytest.raises((PeerLeft, Revoked)) as caught:
                    pairs[comm.rank - 1].barrier()
                text = str(caught.value)
                raise caught.value
        return text, os.getpid()

    found = run(4, rank)
    cause = {"an exception": "ValueError: the cause", "an exit": "SystemExit: early."}.get(end)
    for r in (1, 2, 3):
        text, before = found[r][0], found[r - 1][1]
        assert text.count("The communicator cannot be used any more") == 1
        assert (cause or "why") in text
        assert ".." not in text
        assert told.format(found[0][1], cause=cause) in text
        if r > 1:
            who = f"rank 0 (rank {r - 1} of the job, process {before}) left because rank 0"
            assert text.startswith(who), text


def test_a_message_that_does_not_fit_is_told_after_its_sender_has_left():
    gone = threading.Event()

    def rank(comm):
        if comm.rank == 0:
            comm.send(X, 1)
            with pytest.raises(KeyError), comm:
                raise KeyError
            gone.set()
            return ""
        gone.wait(10)
        with pytest.raises(MismatchError) as found:
            comm.recv(np.empty(3), 0)
        return str(found.value)

    assert "recv on rank 1 (tag 0) expects 24 bytes" in run_threads(2, rank)[1]


def test_a_rank_that_leaves_after_a_mismatch_tells_of_that(run):
    def rank(comm):
        pair = comm.split(0 if comm.rank < 2 else None)
        other = comm.split(0 if comm.rank > 0 else None)
        if comm.rank < 2:
            with pytest.raises(MismatchError) as caught, contextlib.closing(comm):
                pair.all_reduce(np.ones(3 + comm.rank))
            if comm.rank == 1:
                other._session.leave(caught.value)
            return ""
        with pytest.raises(PeerLeft) as left:
            other.barrier()
        return str(left.value)

    text = run(3, rank)[2]
    assert " left because ranks called different things; field 'count' differs\n" in text
    assert text.count("The communicator cannot be used any more") == 1


def test_a_message_that_does_not_come_tells_what_others_do():
    def ranks(comm):
        told = []
        if comm.rank == 0:
            comm.recv(np.empty(1), 1)  # from here on rank 1 waits
            comm.recv(np.empty(1), 2)
            time.sleep(0.3)
            for call in (comm.recv_object, partial(comm.recv, np.empty(1))):
                with pytest.raises(CollTimeout) as found:
                    call(1, 5, timeout=0.1)
                told.append(str(found.value).split("\n")[1:])
            comm.send(np.ones(1), 1, 7)
        else:
            comm.send(np.ones(1), 0)
        if comm.rank == 1:
            comm.recv(np.empty(1), 0, 7)
        comm.barrier()
        return told

    told, *_ = run_processes(3, ranks)
    for one, two in told:
        assert one == "  rank 1: is in recv(tag=7), waits for rank 0"
        assert two.startswith("  rank 2: is in barrier(")
        assert two.endswith(", waits for rank 0 to make this call")


@pytest.mark.parametrize("hosts", [None, [0, 1]])
def test_nothing_is_told_of_others_once_another_thread_has_closed(hosts):
    def told(comm):
        comm.close()
        return what_others_do(comm._session)

    def ranks(comm):
        if hosts is None:
            return told(comm)
        with chaos.over_tcp(comm, hosts, Config(20.0)) as connected:
            return told(connected)

    assert run_processes(2, ranks) == ["", ""]
