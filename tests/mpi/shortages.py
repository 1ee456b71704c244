"""Programs in which one rank lacks memory, or threads, for a call; each returns what was wrong."""

import contextlib
import ctypes
import resource
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
from later import caught
from mpi4py import MPI

from pycoll import _C
from pycoll.runtime.sessions import two_level_plans

BOUND_S = 5.0


@contextlib.contextmanager
def no_more_memory(spare):
    """Let this process have so many bytes more than it has now."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def large_stacks(nbytes):
    """Let new threads have stacks of this size: so large that none is left of another thread."""
    libc = ctypes.CDLL(None)
    before, now = (ctypes.create_string_buffer(256) for _ in range(2))
    for attributes in (before, now):
        libc.pthread_getattr_default_np(attributes)
    libc.pthread_attr_setstacksize(now, ctypes.c_size_t(nbytes))
    libc.pthread_setattr_default_np(now)
    yield
    libc.pthread_setattr_default_np(before)


def outcomes(comm, call, spare):
    """Make a call for which rank 0 lacks something, then the same again; return what they raise."""
    start = time.monotonic()
    with no_more_memory(spare) if comm.rank == 0 else contextlib.nullcontext():
        first = caught(call)
    took = time.monotonic() - start
    return first, caught(call), took


def let_mpi_have_room(comm, messages=256):
    """Let rank 0's MPI have room for messages that come early.

    Open MPI waits for ever, inside of MPI_Test, for memory for one more.
    """
    world, early = MPI.COMM_WORLD, np.zeros(64)
    if comm.rank:
        sent = [world.Isend(early, 0) for _ in range(messages)]
    comm.barrier()
    if comm.rank:
        MPI.Request.Waitall(sent)
    else:
        for _ in range((comm.world_size - 1) * messages):
            world.Recv(early)
    comm.barrier()


def no_memory(comm):
    """Let rank 0 have no memory for what a call needs besides its arrays, and make it again."""
    let_mpi_have_room(comm)
    wrong = []
    for known in (False, True):
        for later in (False, True):
            twin = comm.dup()
            x = np.ones(1_500_000)
            y = np.ones_like(x)
            plan = twin.plan("all_reduce", like=x)  # bound: what is missing is missing in the call
            if known:
                small = np.ones(100)
                twin.all_reduce(small, out=small)
            if later:
                twin.all_reduce(np.ones(1), async_op=True).wait()  # the thread is there

            def call(twin=twin, x=x, y=y, later=later):
                work = twin.all_reduce(x, out=y, timeout=20, async_op=later)
                return work.wait() if later else work

            (name, text), (again, _), took = outcomes(comm, call, 128 << 10)
            sound = name == ("Revoked" if comm.rank else "MemoryError")
            sound = sound and "rank 0 has no memory" in text and again == "Revoked"
            told = f"known {known}, later {later}: {name} {text}, then {again}, {took:.1f} s"
            wrong += [] if sound and took < BOUND_S else [told]
            comm.barrier()
            twin.close()
            del plan
    return wrong


def no_scratch(comm):
    """Let rank 0 have no memory for what a call in two levels needs between its stages."""
    twin = comm.dup()
    staged = lambda parts, _, **ways: _C.StagedCall(parts, 1 << 62, **ways)  # noqa: E731
    starved = SimpleNamespace(**{**vars(_C), "StagedCall": staged})
    x = np.ones(1000, np.int64)

    def call():
        with mock.patch.object(two_level_plans, "_C", _C if comm.rank else starved):
            twin.all_reduce(x, timeout=20)

    (name, text), (again, _), took = outcomes(comm, call, 1 << 40)
    sound = name == ("Revoked" if comm.rank else "MemoryError") and again == "Revoked"
    told = f"{name} {text}, then {again}, {took:.1f} s"
    comm.barrier()
    twin.close()
    return [] if sound and "rank 0 has no memory" in text and took < BOUND_S else [told]


def no_thread(comm):
    """Let rank 0 have no memory for the thread that makes calls in the background."""
    twin = comm.dup()
    x = np.ones(1000)
    plan = twin.plan("all_reduce", like=x)
    twin.all_reduce(x)

    def call():
        return twin.all_reduce(x, timeout=20, async_op=True).wait()

    with large_stacks(1 << 30):
        (name, text), (again, _), took = outcomes(comm, call, 1 << 26)
    sound = name == again == "TransportError" and "cannot start the helper thread" in text
    told = f"{name} {text}, then {again}, {took:.1f} s"
    comm.barrier()
    twin.close()
    del plan
    return [] if sound and took < BOUND_S else [told]


ALL = (no_memory, no_scratch, no_thread)
