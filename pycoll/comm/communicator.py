"""The communicator: how it is made, shared, checked and ended. Its calls are in other modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from pycoll.comm.collectives import Collectives
from pycoll.comm.fused import FusedCalls
from pycoll.comm.grid import Grid, complete, rings
from pycoll.comm.growing import GrowingJob
from pycoll.comm.messages import Messages
from pycoll.comm.objects import Objects
from pycoll.comm.observation import Observation
from pycoll.comm.other_names import NamesFromElsewhere, name_here
from pycoll.comm.reductions import MoreReductions
from pycoll.comm.v_variants import RaggedCollectives
from pycoll.comm.windows import Windows
from pycoll.cuda import call_marks, open_device
from pycoll.errors import ArgumentError, CommClosed
from pycoll.observe.attach import attach
from pycoll.runtime.calls.methods import name_methods, reports_misuse
from pycoll.runtime.calls.work import Work
from pycoll.runtime.sessions.health import Health, check
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.sessions.shared_use import end_use, is_open, joined
from pycoll.runtime.sessions.shrink import shrink
from pycoll.runtime.startup.make_groups import split

_UNDEFINED = -32766  # of MPICH and Open MPI


class Communicator(
    Collectives,
    RaggedCollectives,
    MoreReductions,
    FusedCalls,
    Objects,
    Messages,
    Windows,
    GrowingJob,
    Observation,
    NamesFromElsewhere,
):
    """A group of ranks that communicate.

    Made by `pycoll.init`, and by `split`, `dup`, `shrink` and `grow` of another one. It is for one
    thread at a time. Every collective must be called by all ranks, in the same order, with the same
    arguments; anything else is a `MismatchError` on every rank.

    Arguments that all collectives share:

    * ``x``: any array (NumPy, buffer protocol, ``__array_interface__``, DLPack, CuPy). A
      non-contiguous input is packed first. Inputs are not modified unless ``out`` is ``x``;
      `broadcast` and `recv` write into ``x``.
      Reductions take ``int8`` to ``uint64``, ``float16``, ``bfloat16``, ``float32``, ``float64``,
      ``float8_e4m3fn`` and ``float8_e5m2`` (the two of ml_dtypes and PyTorch; what is too large
      for the former becomes NaN), complex types with ``sum``, ``avg`` and ``prod``, and bool with
      ``and``, ``or``, ``xor``, ``min`` and ``max``; all else takes any dtype of NumPy but Python
      objects. Bytes are in native order.
      A number of Python's becomes an array of int64, float64, complex128 or bool, one of NumPy's an
      array of its type, and gives a number; a list of numbers becomes an array.
    * ``out``: array for the result, C-contiguous and writable; ``out=x`` works in place; by
      default a new array of the kind of ``x``. In gathers it may have a row for each rank, and a
      block of ``x``, which has one, may come without that dimension.
    * ``root``: the rank that a call starts from or ends at, the same on every rank.
    * ``options``: any of those below, by name; for reductions ``order``, too.
    * ``algorithm``: name of an algorithm, or an `Algorithm`; by default the selector's choice.
    * ``timeout``: seconds until `CollTimeout`; by default the communicator's.
    * ``async_op``: return a `Work` at once; the call proceeds in the background.
    * ``stream``: for arrays on a CUDA device, see docs/cuda-python.md: the stream on which the call
      runs, anything with ``__cuda_stream__`` or a handle; by default the current one of CuPy.

    Errors that all collectives raise: `ArgumentError` (nothing was sent; the communicator stays
    usable), `PeerRejected` (another rank refused its arguments; likewise), `MismatchError`,
    `PeerLost`, `PeerLeft`, `CollTimeout`, `Revoked`, `CommClosed`, `ForkedError`,
    `ConcurrentUseError`.
    """

    def __init__(self, session: Session) -> None:
        """Wrap a session; see `pycoll.init`."""
        self._session = session
        self._fast = session.fast
        session.users.add(self)
        session.open_device = open_device
        session.for_users = True
        session.can_shrink = session.control is not None
        attach(session, call_marks)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self)
        if not (name.startswith("_") or hasattr(kind, name)) and name_here(name, kind):
            getattr(self, name)  # which says what it is called
        super().__setattr__(name, value)

    def _closed(self) -> NoReturn:
        raise CommClosed(self._session.closed_because)

    @property
    def rank(self) -> int:
        """Rank of this process (or thread) in the communicator."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._session.world_size

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of the host of each rank, counted from 0.

        Ranks that share no memory count as hosts of their own, as all do with ``transport="mpi"``.
        ``comm.split(comm.hosts[comm.rank])`` makes a communicator of each host.
        """
        return self._session.hosts

    @property
    def local_rank(self) -> int:
        """Number of this rank among those of its host, from 0; for the choice of a GPU."""
        return self.hosts[: self.rank].count(self.hosts[self.rank])

    @property
    def transport(self) -> str:
        """How its ranks reach each other, in words."""
        return self._session.transport

    def __repr__(self) -> str:
        return f"<pycoll.Communicator rank {self.rank} of {self.world_size}>"

    def __reduce__(self) -> Any:
        raise TypeError("a communicator cannot be copied or pickled; dup() makes another one")

    @reports_misuse
    def check(self, *, timeout: float | None = None) -> Health:
        """Find out whether the communicator is well; a collective.

        Every rank answers, all agree on the state of the communicator, and messages travel between
        every two ranks.

        Returns:
            Who answered how fast, and by which transport.

        Raises:
            MismatchError: If ranks disagree.
            PeerLost: If a rank has died or, as `PeerLeft`, left.
            CollTimeout: If one does not answer, or nothing arrives between two of them.
        """
        return check(self._session, timeout)

    @reports_misuse
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Make communicators of the ranks with equal colours; a collective.

        Args:
            color: Group to join, or None to join none.
            key: Ranks of a group are ordered by (key, rank).

        Returns:
            The new communicator, or None for ``color=None``.
        """
        session = split(self._session, self._session.refusing(lambda: _color(color)), key)
        return None if session is None else type(self)(session)

    @reports_misuse
    def dup(self) -> Communicator:
        """Make a communicator of the same ranks with traffic of its own; a collective."""
        made = self.split(0)
        assert made is not None
        return made

    @reports_misuse
    def grid(self, shape: Sequence[int], *, periods: bool | Sequence[bool] = False) -> Grid:
        """Arrange the ranks along axes, in C order; a collective.

        Args:
            shape: Number of ranks along each axis; 0 stands for one to be chosen.
            periods: Whether the axes, or each of them, are closed to rings.

        Returns:
            The grid, with messages of its own: shifts, halos, exchanges between neighbours.

        Raises:
            ArgumentError: If the shape does not hold all ranks, or periods are not one or as many.
        """

        def checked() -> tuple[tuple[int, ...], tuple[bool, ...]]:
            lengths = complete(shape, self.world_size)
            return lengths, rings(periods, len(lengths))

        lengths, wraps = self._session.refusing(checked)
        return Grid(self.dup(), lengths, wraps)

    def shrink(self, *, timeout: float | None = None) -> Communicator:
        """Make a communicator of the ranks that are left, after a failure.

        Every rank that goes on calls it, having caught the error that the others got, too. Ranks
        are gone when their process has died, or when they have closed the communicator or left it
        by an exception. A rank that lives is never left out: it is waited for, even if it has
        become another program. This communicator raises from then on, if it did not before, and so
        do those that were split from it with a rank that does not come at once, which may wait
        there. They are still to be closed. Arrays in symmetric memory stay what they are, and the
        memory of those who are gone stays taken until the job ends.

        A call may have succeeded on some ranks and failed on others, so agree on where to go on,
        as in ``examples/survive.py``. An exception other than `CollTimeout`, as by Ctrl-C, makes
        this rank one of those who have left.

        Args:
            timeout: Seconds to wait for ranks that have neither come nor gone; by default the
                communicator's.

        Returns:
            The new communicator, in which ranks have the order that they had in this one.

        Raises:
            CollTimeout: If a rank has neither come nor gone in time. Call `shrink` again to go on
                waiting; the others may be in the new communicator already. A rank that closes this
                one instead is gone.
            ArgumentError: For a limit that is not above 0, and for ranks that reach each other over
                MPI. The rank may call it again.
            CommClosed: If this rank has closed or left the communicator.
            ConcurrentUseError: While another thread is inside a call.

        Source: Bland, Bouteiller, Herault, Bosilca and Dongarra, "Post-failure recovery of MPI
        communication capability: design and rationale", IJHPCA 27(3), 2013 (revoke, shrink).
        """
        return type(self)(joined().follow(self._session, shrink(self._session, timeout)))

    def abort(self, reason: str = "abort was called") -> None:
        """Make each rank's next call raise `Revoked`, and say ``reason``; for any thread."""
        self._session.abort(reason)

    def close(self) -> None:
        """Leave the communicator and free its memory; not a collective, harmless if repeated.

        Where others have it by `pycoll.init`, too, this object is closed, and the rank leaves when
        the last of them closes it.

        It waits until messages of `isend` are received that nobody has waited for, for as long as
        a call may take. With ``strict="next"`` it also waits for the others, if this rank has left
        calls early that are not known to be theirs, too: see docs/mpi.md.

        Raises:
            ConcurrentUseError: If a thread is inside a collective, or waits for a message of
                `isend`; nothing has been closed.
            CollError: What has become of such a message or call; the communicator has been closed.
        """
        if is_open(self._session):
            self._session = end_use(self._session, self)
            if self._session.users:  # others go on
                del self._fast

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is not None:
            self._session.leave(error)
            if self._session.device is not None:
                self._session.device.abort()  # the peers will not come any more
        self.close()


def _color(color: Any) -> Any:
    """Refuse what MPI has for a rank that is to be left out."""
    if type(color) is int and color == _UNDEFINED:
        raise ArgumentError(f"color={color} is MPI.UNDEFINED; here None leaves a rank out")
    return color


name_methods(Communicator)

__all__ = ["Communicator", "Work"]
