"""Programs that make communicators out of others; each returns what was wrong."""

import os
import resource
import threading

import numpy as np

import pycoll
from pycoll.runtime.sessions import two_level_session


def beside_each_other(*functions):
    """Call functions on threads that begin at the same time; return what they raise."""
    start, raised = threading.Barrier(len(functions)), []

    def run(function):
        try:
            start.wait()
            function()
        except Exception as error:
            raised.append(repr(error))

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def dups_beside_each_other(comm):
    """Duplicate two communicators on two threads: the copies do not meet each other's messages."""
    parents = [comm.dup() for _ in range(2)]
    for i in range(60):
        copies, sums = {}, {}

        def make(which, copies=copies):
            copies[which] = parents[which].dup()

        def use(which, copies=copies, sums=sums):
            x = np.full(4, 10.0**which)
            sums[which] = {float(copies[which].all_reduce(x).sum()) for _ in range(20)}

        for step in (make, use):
            raised = beside_each_other(*(lambda w=w, step=step: step(w) for w in range(2)))
            if raised:
                return [f"{i}: {raised}"]
        n = comm.world_size
        if sums != {which: {n * 4 * 10.0**which} for which in range(2)}:
            return [f"{i}: {sums}"]
        for copy in copies.values():
            copy.close()
    return []


def jobs_beside_each_other(comm):
    """Use two communicators that are not of one job on two threads."""
    from mpi4py import MPI  # not before: init must do without

    worlds = [MPI.COMM_WORLD.Dup() for _ in range(2)]
    made = [pycoll.from_mpi(world, transport="mpi") for world in worlds]
    wrong = []

    def use(which):
        for i in range(4000):
            x = np.full(1 if i % 3 else 20_000, 10.0**which)
            if (made[which].all_reduce(x) != comm.world_size * 10.0**which).any():
                wrong.append(f"{which}: call {i}")

    wrong += beside_each_other(lambda: use(0), lambda: use(1))
    for own in made:
        own.close()
    return wrong


def one_has_no_descriptors_left(comm):
    """Let one rank be unable to open memory while all make groups; the parent stays as it was."""
    n, wrong = comm.world_size, []
    comm.dup().close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for bad in range(n):
        for way in ("dup", "split"):
            free = os.dup(0)
            os.close(free)
            if comm.rank == bad:
                resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            try:
                made = comm.dup() if way == "dup" else comm.split(comm.rank // 2)
                text = f"made {made}"
            except pycoll.CollError as error:
                text = f"{type(error).__name__}: {error}"
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            expected = "PeerRejected: rank " if comm.rank != bad else "TransportError: "
            if not text.startswith(expected) or "Too many open files" not in text:
                wrong.append(f"{way}, rank {bad}: {text}")
            for again in (comm, comm.dup()):
                wrong += [] if again.all_reduce(np.ones(3))[0] == n else [f"{way}: the sum"]
            again.close()
    return wrong


def one_host_fails(comm):
    """Let the ranks of one host fail while they make a group of their own: all others hear why."""
    twin, split = comm.dup(), two_level_session.split

    def fails(node, *given):
        node.abort("enough")
        return split(node, *given)

    if comm.rank == 0:
        two_level_session.split = fails
    try:
        text = f"made {twin.dup()}"
    except pycoll.CollError as error:
        text = f"{type(error).__name__}: {error}"
    two_level_session.split = split
    twin.close()
    comm.barrier()
    return [] if text.startswith("Revoked: ") and "enough" in text else [text]


ALL = (
    dups_beside_each_other,
    jobs_beside_each_other,
    one_has_no_descriptors_left,
    one_host_fails,
)
