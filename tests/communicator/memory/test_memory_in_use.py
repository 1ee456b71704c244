"""Registered arrays that a call uses while another thread, or a forked child, moves them back."""

import threading
import time

import numpy as np
import pytest

import chaos
from faults import in_child, mode_at
from pycoll.config import Config
from pycoll.errors import ArgumentError, PeerRejected, Revoked
from pycoll.runtime.calls.prepare import Caller
from pycoll.runtime.sessions.session import Session
from pycoll.testing import run_processes


@pytest.mark.parametrize("async_op", [False, True])
def test_a_forked_child_is_in_no_call(async_op):
    """It may move back an array that a thread of its parent, or the queue there, works on."""

    def rank(comm):
        x = np.full(1 << 16, comm.rank + 1.0)
        comm.register(x)
        if comm.rank == 1:
            comm.recv(np.empty(1), 0)
            return None, comm.all_reduce(x, out=x).max()
        works = []
        call = threading.Thread(
            target=lambda: works.append(comm.all_reduce(x, out=x, async_op=async_op))
        )
        call.start()
        registration = comm._session.memory._registered[x.ctypes.data][1]
        deadline = time.monotonic() + 10
        while not registration.is_held or (async_op and call.is_alive()):
            assert time.monotonic() < deadline

        def child():
            comm.unregister(x)
            return int(mode_at(x.ctypes.data + 4096) != "rw-p")

        ended = in_child(child)
        comm.send(np.ones(1), 1)
        call.join()
        if async_op:
            works.pop().wait()
        return ended, x.max()

    assert run_processes(2, rank) == [(0, 3), (None, 3)]


@pytest.mark.parametrize("role", ["x", "out"])
def test_an_array_of_a_v_variant_stays_where_it_is(role):
    def rank(comm):
        arrays = {"x": np.ones(1 << 16), "out": np.empty(2 << 16)}
        comm.register(arrays[role])
        comm.all_gather_v(**arrays)  # the next one holds them from its beginning
        if comm.rank == 1:
            comm.recv(np.empty(1), 0)
            return comm.all_gather_v(**arrays).max()
        thread = threading.Thread(target=comm.all_gather_v, kwargs=arrays)
        thread.start()
        deadline = time.monotonic() + 10
        registration = comm._session.memory._registered[arrays[role].ctypes.data][1]
        while not registration.is_held:
            assert time.monotonic() < deadline  # until the call has begun
        with pytest.raises(ArgumentError, match="in use by a call of another thread"):
            comm.unregister(arrays[role])
        comm.send(np.ones(1), 1)
        thread.join()
        comm.unregister(arrays[role])
        return arrays["out"].max()

    assert run_processes(2, rank) == [1, 1]


@pytest.mark.parametrize("staged", ["neither", "x", "out"])
@pytest.mark.parametrize("async_op", [False, True])
def test_an_array_that_a_call_uses_stays_where_it_is(staged, async_op):
    """Also where peers do not work on it because the other array is an ordinary one."""

    def rank(comm):
        x, out = np.ones(1 << 16), np.empty(1 << 16)
        mine = out if staged == "x" else x
        if staged == "neither":
            out = x
        comm.register(mine)
        if comm.rank == 1:
            comm.recv(np.empty(1), 0)
            return comm.all_reduce(x, out=out).max()
        works = []

        def call():
            works.append(comm.all_reduce(x, out=out, async_op=async_op))

        thread = threading.Thread(target=call)
        thread.start()
        deadline = time.monotonic() + 10
        registration = comm._session.memory._registered[mine.ctypes.data][1]
        while not registration.is_held or (async_op and thread.is_alive()):
            assert time.monotonic() < deadline  # until the call has begun
        whose = "in the background" if async_op else "of another thread"
        with pytest.raises(ArgumentError, match=f"in use by a call {whose}"):
            comm.unregister(mine)
        comm.send(np.ones(1), 1)
        thread.join()
        if async_op:
            works[0].wait()
        comm.unregister(mine)
        return out.max()

    assert run_processes(2, rank) == [2, 2]


def unregistered_after(patch, comm, x, method, calls=1):
    """Let another thread unregister an array after calls of a method; return what it got."""
    owner, name = method
    run, got, left = getattr(owner, name), [], [None] * calls

    def unregister():
        try:
            comm.unregister(x)
            got.append("done")
        except ArgumentError as error:
            got.append(str(error))

    def call(*args):
        result = run(*args)
        if left and left.pop() is None and not left:
            thread = threading.Thread(target=unregister)
            thread.start()
            thread.join()
        return result

    patch.setattr(owner, name, call)
    return got


@pytest.mark.parametrize("async_op", [False, True])
def test_an_array_that_another_thread_unregisters_as_a_call_begins(async_op):
    """From when it is looked up where the array lies, the call keeps it there.

    The line of the program is asked for before that, and again afterwards.
    """

    def rank(comm):
        x = np.full(1 << 16, comm.rank + 1.0)
        comm.register(x)
        comm.barrier()
        with pytest.MonkeyPatch.context() as patch:
            got = ["in use by"]
            if comm.rank == 0:
                got = unregistered_after(patch, comm, x, (Session, "site"), calls=2)
            result = comm.all_reduce(x, out=x, async_op=async_op)
        result = result.wait() if async_op else result
        assert "in use by" in got[0]
        comm.unregister(x)
        return result.min(), result.max(), (x == 3).all()

    assert run_processes(2, rank) == [(3, 3, True)] * 2


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("method", [(Caller, "_bound"), (Session, "prepare")])
def test_an_array_that_another_thread_unregisters_before_a_call_begins(method, async_op):
    """Peers hear of it, as of any argument that cannot be used."""

    def rank(comm):
        x = np.full(1 << 16, comm.rank + 1.0)
        out = comm.empty(x.size, x.dtype)
        comm.register(x)
        comm.barrier()
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 0:
                got = unregistered_after(patch, comm, x, method)
                with pytest.raises(ArgumentError):
                    comm.all_reduce(x, out=out, async_op=async_op)
                assert got == ["done"]
                comm.register(x)
            else:
                with pytest.raises(PeerRejected, match="rank 0 refused its arguments"):
                    comm.all_reduce(x, out=out)
        return comm.all_reduce(x, out=out).max(), x.max()

    assert run_processes(2, rank) == [(3, 1), (3, 2)]


@pytest.mark.parametrize("call", ["irecv", "recv", "sendrecv"])
def test_an_array_that_a_message_comes_into_stays_where_it_is(call):
    """What came while it was moved back would be lost."""

    def rank(comm):
        x = np.zeros(1 << 16)
        if comm.rank == 1:
            comm.recv(np.empty(1), 0, 1)
            comm.send(x + 7, 0)
            return 7
        comm.register(x)
        blocking = {
            "irecv": lambda: works.append(comm.irecv(x, 1)),
            "recv": lambda: comm.recv(x, 1),
            "sendrecv": lambda: comm.sendrecv(np.ones(1), 0, x, 1, tag=2, recv_tag=0),
        }
        works = []
        thread = threading.Thread(target=blocking[call])
        thread.start()
        registration = comm._session.memory._registered[x.ctypes.data][1]
        deadline = time.monotonic() + 10
        while not registration.is_held or (call == "irecv" and thread.is_alive()):
            assert time.monotonic() < deadline
        with pytest.raises(ArgumentError, match="in use by a call"):
            comm.unregister(x)
        comm.send(np.ones(1), 1, 1)
        thread.join()
        for work in works:
            work.wait()
        comm.unregister(x)
        return x.max()

    assert run_processes(2, rank) == [7, 7]


@pytest.mark.parametrize("hosts", [None, [0, 0, 1]])
def test_an_array_of_a_message_that_has_failed_moves_back(hosts):
    def rank(comm):
        if hosts is not None:
            comm = chaos.over_tcp(comm, hosts, Config(10.0))
        x, twin = np.zeros(1 << 16), comm.dup()
        comm.register(x)
        works = [twin.irecv(x, 1), twin.irecv(x[9:], 1, 1)]
        comm.barrier()
        if comm.rank == 0:
            twin.abort("enough")
        with pytest.raises(Revoked, match="enough"):
            works[0].wait()
        ended = works[1].done()
        comm.unregister(x)
        comm.barrier()
        return ended

    assert run_processes(3, rank, timeout=60) == [True] * 3
