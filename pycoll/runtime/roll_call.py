"""At start-up: waiting until every rank has come, and until every rank is ready."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pycoll.errors import CollTimeout, TransportError, in_words

_BUSY_S, _POLL_S = 0.01, 0.001
_ANSWER_S = 0.5  # for the names of those who have come

_S = TypeVar("_S")


def make_everywhere(
    make: Callable[[], _S],
    exchange: Callable[[str], list[str]],
    undo: Callable[[_S], object] | None = operator.methodcaller("close"),
) -> _S:
    """Make something on every rank, or on none; all ranks call this together.

    Args:
        make: Makes it.
        exchange: Gathers a text of every rank.
        undo: What becomes of it where it was made, if others could not; None for nothing.

    Raises:
        TransportError: If it failed on other ranks only; the text names them.
        BaseException: What `make` has raised on this one.
    """
    made, failure = None, None
    try:
        made = make()
    except BaseException as error:  # an interrupt, too: the others wait
        failure = error
    said = exchange("" if failure is None else in_words(failure))
    if failure is not None:
        raise failure
    if any(said):
        if undo is not None:
            undo(made)
        texts = (f"rank {rank} cannot join: {text}" for rank, text in enumerate(said) if text)
        raise TransportError("; ".join(texts))
    return made


def await_everybody(MPI: Any, comm: Any, timeout_s: float) -> None:
    """Return when every rank of an mpi4py communicator has called this; a collective.

    A rank that has waited for too long tells all others. They give up too, and tell: so all know
    who has come, and one that comes later hears that it is too late. Nothing is sent otherwise.

    Args:
        MPI: The module ``mpi4py.MPI``.
        comm: An intra-communicator of the user. Messages on it have the greatest tag.
        timeout_s: How long to wait for the last rank, in seconds.

    Raises:
        CollTimeout: On every rank that has come, with the numbers of those that have not.
    """
    tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # only there in some MPIs

    def given_up() -> bool:
        return comm.Iprobe(MPI.ANY_SOURCE, tag)

    # Who passes the first barrier knows that everybody came, but not that nobody has given up.
    if not all(_wait(comm.Ibarrier(), given_up, timeout_s) for _ in range(2)):
        here = _call_roll(MPI, comm, tag)
        absent = [r for r in range(comm.size) if r not in here]
        raise CollTimeout(_told(comm.rank, absent, timeout_s))


def _wait(request: Any, given_up: Callable[[], bool], timeout_s: float) -> bool:
    start = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - start
        if waited > timeout_s or given_up():
            return False
        time.sleep(0 if waited < _BUSY_S else _POLL_S)
    return True


def _call_roll(MPI: Any, comm: Any, tag: int) -> set[int]:
    """Return which ranks have come."""
    nothing = [None, 0, MPI.BYTE]
    for peer in range(comm.size):
        if peer != comm.rank:
            comm.Isend(nothing, peer, tag).Free()
    here, end, status = {comm.rank}, time.monotonic() + _ANSWER_S, MPI.Status()
    while time.monotonic() < end and len(here) < comm.size:
        while comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            comm.Recv(nothing, status.source, tag)
            here.add(status.source)
        time.sleep(_POLL_S)
    return here


def _told(rank: int, absent: list[int], timeout_s: float) -> str:
    if not absent:
        return (
            f"start-up: the ranks have come more than {timeout_s:g} s after each other; a longer "
            "time limit (PYCOLL_TIMEOUT, timeout=) waits for them"
        )
    names = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    have = "has" if len(absent) == 1 else "have"
    return (
        f"start-up: {names} {have} not called pycoll.init or pycoll.from_mpi on this communicator "
        f"within {timeout_s:g} s; all of its ranks must. Rank {rank} has given up"
    )
