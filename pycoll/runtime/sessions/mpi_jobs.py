"""How ranks send messages by MPI: what communicators made from one of mpi4py's have in common.

Jobs serve again: an MPI has some thousands of communicators to give, and a job that has sent
messages cannot know when its own may be freed. So they are an attribute of mpi4py's communicator,
by the number of the host of each of its ranks; another one has those of parts of the ranks.
"""

from __future__ import annotations

import functools
import os
import threading
import zlib
from collections.abc import Callable
from typing import Any

from pycoll import _C
from pycoll.errors import CollTimeout, TransportError
from pycoll.runtime.sessions.message_session import MpiJob
from pycoll.runtime.sessions.reports import raising
from pycoll.runtime.startup.hosts import Card
from pycoll.runtime.startup.rendezvous import Rendezvous, make_everywhere

Jobs = dict[tuple[int, ...], MpiJob]


def jobs_of(MPI: Any, comm: Any) -> Jobs:
    """Return what was made from a communicator before."""
    return _kept(comm, _key(MPI, "all its ranks"))


def _kept(comm: Any, key: int) -> Jobs:
    if comm.Get_attr(key) is None:
        comm.Set_attr(key, {})
    return comm.Get_attr(key)


@functools.cache
def _key(MPI: Any, what: str) -> int:
    return MPI.Comm.Create_keyval()


def duplicate(MPI: Any, comm: Any, timeout_s: float) -> Any:
    """Return a communicator of our own; a collective. Raises CollTimeout."""
    made, request = comm.Idup()
    Rendezvous(MPI, comm, timeout_s).finish(lambda: request, made)
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
    """Return the job of ranks on these hosts; a new one if there is none. A collective.

    The first job takes `own`, a duplicate of the user's communicator; `tell` gathers texts.

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


def find_group(
    MPI: Any,
    world: Any,
    ranks: tuple[int, ...],
    cards: list[Card],
    hosts: tuple[int, ...],
    exchange: Callable[[str, Any], list[Any]],
    timeout_s: float,
) -> MpiJob:
    """Return the job of a part of the ranks, made before or now; a collective of those.

    `ranks` are numbers in `world`, in the new order; `exchange` does not use MPI.

    Raises:
        CollTimeout: If a rank stops or dies meanwhile.
        TransportError: If MPI has no more communicators, or a rank no memory.
    """
    jobs, key = _kept(world, _key(MPI, "parts")), (*ranks, *hosts)

    def make() -> MpiJob:
        try:
            comm = create_group(MPI, world, ranks, timeout_s)
        except MPI.Exception as error:
            text = f"{library(MPI)} gives no communicator for ranks {list(ranks)}: {error}"
            raise TransportError(text) from error
        return make_job(MPI, comm, cards, hosts)

    if not all(exchange("has-job", key in jobs)):  # one may have failed when others had theirs
        tell = lambda text: exchange("makes-job", text)  # noqa: E731
        jobs[key] = make_everywhere(make, tell, undo=None)
    return jobs[key]


def create_group(MPI: Any, world: Any, ranks: tuple[int, ...], timeout_s: float) -> Any:
    """Return a communicator of a part of the ranks; a collective of those, all of whom have come.

    MPI_Comm_create_group cannot be given up. So a thread calls it, which stays in it if a rank does
    not; below MPI_THREAD_MULTIPLE nothing limits the time.

    Raises:
        CollTimeout: If it takes too long.
    """
    tag, found = zlib.crc32(repr(ranks).encode()) & 0x7FFF, []

    def create() -> None:
        try:
            found.append((world.Create_group(world.group.Incl(ranks), tag), None))
        except BaseException as error:  # for who waits
            found.append((None, error))

    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        thread = threading.Thread(target=create, daemon=True)
        thread.start()
        thread.join(min(timeout_s, threading.TIMEOUT_MAX))
    else:
        create()
    if not found:
        raise CollTimeout(
            f"start-up: a rank has come to it, but not made a communicator within {timeout_s:g} s: "
            f"stopped, dead or busy. Rank {world.rank} of MPI has given up"
        )
    comm, error = found[0]
    if error is not None:
        raise error
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def make_job(MPI: Any, comm: Any, cards: list[Card], hosts: tuple[int, ...]) -> MpiJob:
    """Describe an mpi4py communicator of our own to the engine."""
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    return MpiJob(_api(MPI, comm), comm, cards, hosts, library(MPI), threads=threads)


def library(MPI: Any) -> str:
    """Return name and version of the MPI that mpi4py uses."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _api(MPI: Any, comm: Any) -> _C.MpiApi:
    return raising(
        _C.MpiApi,
        module=os.path.realpath(MPI.__file__),
        comm=MPI._handleof(comm),
        byte=MPI._handleof(MPI.BYTE),
        tag_ub=MPI.COMM_WORLD.Get_attr(MPI.TAG_UB),
        multiple=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        proc_failed=getattr(MPI, "ERR_PROC_FAILED", -1),
    )
