"""How ranks send messages by MPI: what communicators made from one of mpi4py's have in common.

Jobs serve again: an MPI has some thousands of communicators to give, and a job that has sent
messages cannot know when its own may be freed. So they are an attribute of mpi4py's communicator,
by the number of the host of each of its ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from pycoll import _C
from pycoll.runtime.hosts import Card
from pycoll.runtime.mpi_session import MpiJob
from pycoll.runtime.reports import raising
from pycoll.runtime.roll_call import RollCall, make_everywhere

Jobs = dict[tuple[int, ...], MpiJob]


def jobs_of(MPI: Any, comm: Any) -> Jobs:
    """Return what was made from a communicator before."""
    if comm.Get_attr(_key(MPI)) is None:
        comm.Set_attr(_key(MPI), {})
    return comm.Get_attr(_key(MPI))


@functools.cache
def _key(MPI: Any) -> int:
    return MPI.Comm.Create_keyval()


def duplicate(MPI: Any, comm: Any, timeout_s: float) -> Any:
    """Return a communicator of our own; a collective. Raises CollTimeout."""
    made, request = comm.Idup()
    RollCall(MPI, comm, timeout_s).finish(lambda: request, made)
    made.Set_errhandler(MPI.ERRORS_RETURN)
    return made


def free(own: Any, jobs: Jobs) -> None:
    """Free a communicator that served at start-up only; a collective."""
    if all(job.comm != own for job in jobs.values()):
        own.Free()


def find_job(
    MPI: Any,
    comm: Any,
    own: Any,
    cards: list[Card],
    hosts: tuple[int, ...],
    tell: Callable[[str], list[str]],
    timeout_s: float,
) -> MpiJob:
    """Return the job of ranks that lie like this; a new one if there is none. A collective.

    Args:
        MPI: The module ``mpi4py.MPI``.
        comm: Communicator of the user.
        own: A duplicate of it, which the first job takes.
        cards: What each of its ranks has said about itself.
        hosts: Number of the host of each rank.
        tell: Gathers a text of every rank.
        timeout_s: Longest time to wait for the others.

    Raises:
        BaseException: On every rank, if one of them has no memory for it.
    """
    jobs = jobs_of(MPI, comm)
    if hosts not in jobs:
        way = duplicate(MPI, comm, timeout_s) if jobs else own
        try:
            made = make_everywhere(lambda: make_job(MPI, way, cards, hosts), tell, undo=None)
        except MPI.Exception:
            raise
        except BaseException:  # on every rank
            if way is not own:
                way.Free()
            raise
        jobs[hosts] = made
    return jobs[hosts]


def make_job(MPI: Any, comm: Any, cards: list[Card], hosts: tuple[int, ...]) -> MpiJob:
    """Describe an mpi4py communicator of our own to the engine."""
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    handle = MPI._handleof(comm)
    return MpiJob(_api(MPI), comm, handle, cards, hosts, library(MPI), threads=threads)


def library(MPI: Any) -> str:
    """Return name and version of the MPI that mpi4py uses."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _api(MPI: Any) -> _C.MpiApi:
    return raising(
        _C.MpiApi,
        module=os.path.realpath(MPI.__file__),
        byte=MPI._handleof(MPI.BYTE),
        tag_ub=MPI.COMM_WORLD.Get_attr(MPI.TAG_UB),
        multiple=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        proc_failed=getattr(MPI, "ERR_PROC_FAILED", -1),
    )
