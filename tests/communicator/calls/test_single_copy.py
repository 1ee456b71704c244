"""Large private arrays, which peers may read where they lie: the same results, errors and bits.

Of equal calls the first two go through cells, the next two read, and then the faster way is taken.
"""

import ctypes
import mmap
import os
import signal
import threading

import numpy as np
import pytest

from cases import IN_PLACE, MOVING, PRIVATE, REDUCING, ROOTED, make, run_case, run_cases
from faults import Event, expect
from pycoll.config import Config
from pycoll.errors import ArgumentError, CollError, MismatchError, PeerLost, PeerRejected, Revoked
from pycoll.testing import run_processes, run_threads

EQUAL_CALLS = 5
READING = [collective for collective in MOVING if collective != "gather"]
LARGE = 66_000  # elements of any type and world: 64 KiB or more in the full vector


def bindings(comm):
    """Return the bound calls of a communicator that have an alternative, with its engine."""
    session = comm._session
    return session.engine, [
        bound for spec, bound in session._caller.plans._bindings.items() if spec.alternative
    ]


def reads(comm):
    """Return how many kinds of call would read their peers' memory next."""
    engine, found = bindings(comm)
    return sum(engine.reads(bound) for bound in found)


def repeated(comm, cases):
    """Run each case several times; return what is wrong, and how often ranks have read."""
    wrong, before = [], 0
    for case in cases:
        wrong += run_cases(comm, [case] * 2)
        before += reads(comm) > 0
        wrong += run_cases(comm, [case] * (EQUAL_CALLS - 2))
    return wrong, before


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("collective", READING)
def test_results(collective, n):
    memories = PRIVATE if collective in IN_PLACE else [m for m in PRIVATE if m != "in_place"]
    cases = [
        make(collective, "float32", n, LARGE // 2 + i, memory=memory)
        for i, memory in enumerate(memories)
    ]
    cases += [make(collective, name, n, LARGE + 1) for name in ("bfloat16", "uint8", "float64")]
    if collective in ROOTED:
        cases += [make(collective, "int64", n, LARGE // 3, root=root) for root in range(1, n)]
    for wrong, read in run_processes(n, repeated, cases, timeout=100):
        assert wrong == []
        assert read == len(cases)


@pytest.mark.parametrize("n", [2, 4])
def test_what_has_no_alternative(n):
    cases = [
        make("all_gather", "float32", n, 1000),  # small
        make("gather", "float32", n, LARGE),  # its root would have to be written to
        make("all_gather", "float32", n, LARGE, algorithm="ring"),
        *(make(collective, "float32", n, LARGE) for collective in REDUCING),
    ]
    assert run_processes(n, repeated, cases) == [([], 0)] * n


def test_threads_and_worlds_of_one_do_not_read():
    cases = [make("all_gather", "float32", 3, LARGE)]
    assert run_threads(3, repeated, cases) == [([], 0)] * 3
    alone = [make("all_gather", "float32", 1, LARGE)]
    assert run_processes(1, repeated, alone) == [([], 0)]


def test_off():
    config = Config(timeout_s=10, heap_bytes=1 << 26, single_copy="off")
    cases = [make(c, "float32", 2, LARGE) for c in READING]
    assert run_processes(2, repeated, cases, config=config) == [([], 0)] * 2
    with pytest.raises(ArgumentError, match="single_copy is 'on'; accepted: auto, off"):
        Config(single_copy="on")


@pytest.mark.skipif(os.getuid() != 0, reason="to become another user takes root")
def test_one_rank_may_not_read():
    case = make("all_gather", "float32", 3, LARGE)

    def rank(comm):
        if comm.rank == 1:
            os.setuid(65534)
        return repeated(comm, [case])

    assert run_processes(3, rank) == [([], 0)] * 3


def secret(nbytes):
    """Return memory that its owner can read and the kernel cannot, or None."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(447, 0)  # memfd_secret
    if fd < 0:
        return None
    os.ftruncate(fd, nbytes)
    return np.frombuffer(mmap.mmap(fd, nbytes), np.float32)


@pytest.mark.skipif(secret(4096) is None, reason="this kernel has no memfd_secret")
def test_memory_that_the_kernel_cannot_read():
    def rank(comm):
        x, out = secret(1 << 20), secret(3 << 20)
        x[:] = comm.rank
        for i in range(EQUAL_CALLS):
            comm.all_gather(x, out=out)
            assert (out.reshape(3, -1) == [[0], [1], [2]]).all()
            out[:] = -1
            assert reads(comm) == 1 or i != 1
        return True

    assert run_processes(3, rank) == [True] * 3


@pytest.mark.skipif(secret(4096) is None, reason="this kernel has no memfd_secret")
def test_other_memory_in_the_place_of_memory_that_the_kernel_has_read():
    """It is not asked again, so the read fails; nobody gets wrong data, and nobody waits."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def rank(comm):
        nbytes = 4 * LARGE
        x = np.frombuffer(mmap.mmap(-1, nbytes), np.float32)
        x[:] = comm.rank
        out = np.empty(2 * LARGE, np.float32)

        def gather(calls):
            for _ in range(calls):
                comm.all_gather(x, out=out)
                assert (out.reshape(2, -1) == [[0], [1]]).all()
                out[:] = -1

        gather(EQUAL_CALLS)
        fd = libc.syscall(447, 0)  # memfd_secret
        os.ftruncate(fd, nbytes)
        assert libc.mmap(x.ctypes.data, nbytes, 3, 0x11, fd, 0) == x.ctypes.data  # MAP_FIXED
        x[:] = comm.rank
        with pytest.raises(CollError, match="the kernel did not let it copy"):
            gather(200)  # now and then they read
        return True

    assert run_processes(2, rank) == [True] * 2


@pytest.mark.parametrize("way", ["timeout", "plan", "strided", "scatter"])
def test_ranks_that_have_no_input(way):
    def rank(comm):
        x = np.full(LARGE, comm.rank, np.float32)
        plan = comm.plan("broadcast", x)
        for i in range(EQUAL_CALLS):
            out = np.full(LARGE, -1, np.float32)
            if way == "timeout":
                out = comm.broadcast(x, timeout=5)
            elif way == "plan":
                out = plan(x)
            elif way == "strided":
                comm.broadcast(np.repeat(x, 2)[::2], out=out)
            else:
                comm.scatter(np.zeros(3 * LARGE, np.float32) if comm.rank == 0 else None, out=out)
            assert (out == 0).all()
            assert reads(comm) == 1 or i != 1
        return True

    assert run_processes(3, rank) == [True] * 3


@pytest.mark.skipif(os.getuid() != 0, reason="to become another user takes root")
def test_a_rank_that_may_not_read_any_more():
    def rank(comm):
        x = np.ones(LARGE, np.float32)
        for _ in range(2):
            comm.all_gather(x)
        if comm.rank == 1:
            os.setuid(65534)
        with pytest.raises(Revoked, match=r"another user.*PYCOLL_SINGLE_COPY=off"):
            comm.all_gather(x)
        return True

    assert run_processes(2, rank) == [True] * 2


def test_calls_that_are_refused_do_not_part_the_ranks():
    """All ranks go on making the same choice."""
    case = make("all_to_all", "float32", 3, LARGE)

    def rank(comm):
        wrong = []
        for i in range(150):
            if i % 7 == 3 and comm.rank == i % 3:
                with pytest.raises(ArgumentError):
                    comm.all_to_all(np.ones(3 * LARGE, np.float32), out=np.ones(5))
            elif i % 7 == 3:
                with pytest.raises(PeerRejected):
                    run_case(comm, case)
            else:
                wrong.append(run_case(comm, case))
        return set(wrong)

    assert run_processes(3, rank, timeout=60) == [{""}] * 3


def test_in_the_background():
    def rank(comm):
        works = []
        for i in range(12):
            x = np.full(LARGE, comm.rank + i, np.float32)
            works.append(comm.all_gather(x, async_op=True))
        return [work.wait().reshape(2, -1)[:, [0, LARGE // 2, -1]].tolist() for work in works]

    wanted = [[[i] * 3, [i + 1] * 3] for i in range(12)]
    assert run_processes(2, rank) == [wanted] * 2


def test_a_group_of_ranks():
    def rank(comm):
        group = comm.split(comm.rank % 2)
        size = group.world_size
        results = [group.all_gather(np.full(LARGE, comm.rank, np.float32)) for _ in range(6)]
        return all(
            (r.reshape(size, -1)[:, 0] == np.arange(size) * 2 + comm.rank % 2).all()
            for r in results
        )

    assert run_processes(4, rank) == [True] * 4


@pytest.mark.parametrize("wait", ["all_gather", "broadcast"])
def test_a_rank_that_is_killed_while_others_read(wait):
    event = Event()

    def rank(comm):
        x = np.ones(16 << 18, np.float32)
        getattr(comm, wait)(x)
        if comm.rank == 1:

            def kill():
                event.happens()
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Timer(0.15, kill).start()

        def call(comm):
            while True:
                getattr(comm, wait)(x)

        return expect(comm, PeerLost, call, event)

    first, code, third = run_processes(3, rank, may_die=[1], timeout=60)
    assert code == -signal.SIGKILL
    assert first[0] == third[0] == "PeerLost"
    assert "rank 1 (process" in first[1]


def test_only_one_rank_names_the_algorithm():
    def rank(comm):
        options = {} if comm.rank else {"algorithm": "direct_pull"}
        with pytest.raises(MismatchError) as caught:
            comm.all_gather(np.ones(LARGE, np.float32), **options)
        return str(caught.value)

    texts = run_processes(3, rank)
    assert "memory" in texts[0]


def test_many_kinds_of_call():
    """More than are remembered; ranks forget all of them at the same call."""

    def rank(comm):
        for count in range(20_000, 21_100):
            assert (comm.broadcast(np.full(count, comm.rank, np.float32)) == 0).all()
        for count in range(20_000, 20_010):
            x = np.zeros(count, np.float32)
            for _ in range(2):  # with an out as not before, so that it is bound anew for certain
                comm.broadcast(x, out=np.empty_like(x))
        return reads(comm)

    assert run_processes(2, rank, timeout=60) == [10] * 2
