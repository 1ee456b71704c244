"""Calls in progress, and calls prepared once to run many times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pycoll import _C
from pycoll.config import check_timeout
from pycoll.errors import ArgumentError, CollTimeout
from pycoll.runtime.arrays.host_arrays import on_device, view
from pycoll.runtime.calls.functions import function_for, own_op
from pycoll.runtime.calls.prepared import CallRequest, Prepared
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.types import Kind


class Owner(Protocol):
    """What calls need of their session."""

    has_raised: bool

    @property
    def engine(self) -> Any:
        """What runs them; raises CommClosed."""

    def sweep(self) -> None:
        """Let go of what calls that have ended have kept."""

    def error(self, kind: str, text: str) -> Exception:
        """Make the exception for a failure of the engine."""

    def refusing(self, prepare: Callable[[], Any]) -> Any:
        """Prepare a call, or let its peers know that it cannot be."""

    def interrupted(self, error: BaseException) -> None:
        """Let all ranks know of an interrupt."""


class QueuedCall:
    """A call in the queue of an engine.

    The hot path makes it without running Python code, so it has no ``__init__``.
    """

    ticket: int | None = None  # its place in the queue; None before it has one
    keep: Any = None  # what has to stay until it has ended, besides the result
    result: Any = None  # what the call gives
    error: Exception | None = None
    ended: bool = False  # it has ended, and `error` is what it has failed with, or None

    def take_outcome(self, engine: Any, describe: Callable[[str, str], Exception]) -> bool:
        """Take over from the engine how the call has ended; tell whether it has.

        Several threads may do so at a time: the error is here before the engine forgets it.
        """
        if self.ended:
            return True
        if self.ticket is None or not engine.done(self.ticket):
            return False
        failure = _C.error_of(engine, self.ticket)
        if failure is not None:
            kind, text = failure
            self.error = MemoryError(text) if kind == "MemoryError" else describe(kind, text)
            _C.forget(engine, self.ticket)
        self.ended = True
        return True

    def let_go(self) -> None:
        """Free what the call has kept, now that it has ended; several threads may, at a time."""
        kept = self.keep
        if isinstance(kept, Prepared) and self.error is None:
            kept.finished()
        self.keep = None


class Work:
    """A call that runs in the background; its arrays are kept alive until it is done."""

    def __init__(self, session: Owner, queued: QueuedCall) -> None:
        """Hold on to a call in the engine's queue; see `Session`."""
        self._session, self._queued_call = session, queued
        self._engine = session.engine  # outlives a close, which finishes the queue

    def __repr__(self) -> str:
        return "<pycoll.Work: wait() returns what the call gives>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied."""
        raise TypeError(
            "a Work stands for one call of this process; it cannot be copied or pickled"
        )

    def done(self) -> bool:
        """Tell whether the call has ended, without waiting."""
        if self._queued_call.ended and self._queued_call.keep is None:
            return True
        if not self._queued_call.ended and not self._engine.done(self._queued_call.ticket):
            return False
        self._session.sweep()  # what the call has kept, such as the buffer of `out`, is free again
        return True

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the call to end.

        Args:
            timeout: Seconds; by default as long as the call itself may take.

        Returns:
            What the blocking call would have returned.

        Raises:
            ArgumentError: If ``timeout`` is no number of seconds, 0 or more.
            CollTimeout: If it is not done in time; the call goes on and may be waited for again.
            CollError: What the blocking call would have raised.
        """
        queued = self._queued_call
        limit = -1.0 if timeout is None else check_timeout(timeout, zero=True)
        if not queued.ended:
            try:
                self._engine.wait(queued.ticket, limit)
                queued.ended = True  # if it has failed, another thread has noted that
            except _C.EngineError as error:
                self._note(error)
            self._session.sweep()
        elif queued.keep is not None:  # another thread is about to let go of it
            self._session.sweep()
        if queued.error is not None:
            self._session.has_raised = True
            raise queued.error
        return queued.result

    def _note(self, error: BaseException) -> None:
        """Keep what the call has failed with; raise what has ended only this wait."""
        describe = self._session.error
        if not self._queued_call.take_outcome(self._engine, describe):
            kind, text = error.args
            raise CollTimeout(text) if kind == "CollTimeout" else describe(kind, text) from None


if TYPE_CHECKING:

    class BoundPlan:
        """A collective for arrays of one shape and dtype; see `pycoll.Communicator.plan`."""

        def __call__(
            self, x: Any, *, out: Any = None, timeout: float | None = None, async_op: bool = False
        ) -> Any:
            """Run it; arguments as for the collective.

            Raises:
                ArgumentError: If ``x`` has not the shape and dtype the plan was made for.
            """

    class PersistentCall:
        """A collective with its arrays; see `pycoll.Communicator.plan`."""

        def __call__(self) -> Any:
            """Run it on these arrays; return the result, the same array every time."""

else:
    BoundPlan, PersistentCall = _C.BoundPlan, _C.Persistent


def make_plan(
    comm: Any,
    session: Any,
    collective: str,
    x: Any,
    out: Any,
    persistent: bool,
    given: dict[str, Any],
) -> BoundPlan | PersistentCall:
    """Prepare a collective; see `pycoll.Communicator.plan`.

    Raises:
        ArgumentError: For arguments that cannot be used.
    """
    if not isinstance(collective, str) or collective not in COLLECTIVES:
        raise ArgumentError(
            f"collective={collective!r} cannot be planned; accepted: {', '.join(COLLECTIVES)}"
        )
    if out is not None and not persistent:
        raise ArgumentError("out= is for persistent=True; else pass it to the plan")
    what, given = COLLECTIVES[collective], {**given, "op": own_op(given["op"])}
    request = CallRequest(Kind[collective.upper()], **given)
    if persistent:
        named = {"algorithm"} | ({"root"} if what.rooted else set())
        named |= {"op", "order"} if what.reduces else set()
        chosen = {name: given[name] for name in named if given[name] != _USUAL[name]}
        method = partial(getattr(comm, collective), **chosen)
        return _persistent(session, request, method, x, out)
    op, order = (given["op"], given["order"]) if what.reduces else ("sum", None)
    root, in_place = given["root"] if what.rooted else 0, request.kind == Kind.BROADCAST
    bound = request.kind, op, root, order, given["algorithm"]
    slow = _CheckedCall(session, x, in_place, *bound)
    if function_for(request.kind, op, x) is None:  # else there is nothing to compile
        session.prepare(request, x, None)
    return BoundPlan(session.fast, x, in_place, *bound, slow)


_USUAL = {"algorithm": None, "root": 0, "op": "sum", "order": None}


def _persistent(
    session: Any, request: CallRequest, method: Callable[..., Any], x: Any, out: Any
) -> PersistentCall:
    """Bind a collective to its arrays. What only Python code can run is left to the method."""
    if on_device(x) or on_device(out) or function_for(request.kind, request.op, x) is not None:
        return PersistentCall(session.fast, None, 0, 0, None, None, partial(method, x, out=out))
    if request.kind == Kind.BROADCAST and out is None:
        out = x
    prepared = session.prepare(request, x, out)
    result, where = prepared.result, (prepared.in_ptr, prepared.out_ptr)
    simple = prepared.plain and not prepared.registered and not prepared.detours()
    own = all(place in (0, _place(array)) for place, array in zip(where, (x, result), strict=True))
    call = session.remembered(prepared) if simple and own else None
    if not isinstance(call, _C.BoundCall):  # it runs in two levels
        call = None
    slow = partial(method, x, out=result)
    return PersistentCall(session.fast, call, *where, result, prepared, slow)


def _place(array: Any) -> int:
    return 0 if array is None else view(array, "x").pointer


class _CheckedCall:
    """What a plan does where the hot path does not serve: checks the array, and calls in Python."""

    def __init__(self, session: Any, like: Any, in_place: bool, *chosen: Any) -> None:
        """Take an array like those that will come, and the arguments from ``op`` on."""
        self._session, self._in_place, self._chosen = session, in_place, chosen
        pattern = view(like, "like")
        self._shape, self._name, self._caller_code = (
            pattern.array.shape,
            pattern.name,
            pattern.caller_code,
        )

    def __call__(
        self, x: Any, *, out: Any = None, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        try:
            self._session.refusing(lambda: self._check(x))
            kind, *rest = self._chosen
            out = x if self._in_place and out is None else out
            return self._session.call(kind, x, out, *rest, timeout, async_op)
        except Exception:
            raise
        except BaseException as error:
            self._session.interrupted(error)
            raise

    def _check(self, x: Any) -> None:
        given = view(x, "x")
        if given.array.shape != self._shape or given.caller_code != self._caller_code:
            raise ArgumentError(
                f"x is {given.name}{list(given.array.shape)}; this plan was made for "
                f"{self._name}{list(self._shape)}"
            )
