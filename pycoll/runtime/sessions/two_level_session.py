"""One rank's side of a communicator over several hosts, some of which have several ranks."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import numpy as np

from pycoll import _C
from pycoll.config import Config
from pycoll.errors import (
    ArgumentError,
    CollError,
    CommClosed,
    ConcurrentUseError,
    ForkedError,
    PeerRejected,
    Revoked,
    cut,
)
from pycoll.runtime.arrays.symmetric_memory import Memory
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.calls.prepared import Prepared
from pycoll.runtime.selection.select import Choice
from pycoll.runtime.selection.topology import Topology
from pycoll.runtime.selection.tuning_table import Tuning
from pycoll.runtime.sessions.message_session import OWN_THREAD, MpiJob, MpiSession
from pycoll.runtime.sessions.reports import describe, why_left
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.sessions.two_level_async import CallThread, DeferredCalls, TwoLevelWork
from pycoll.runtime.sessions.two_level_plans import Binder
from pycoll.runtime.startup.hosts import Sharing
from pycoll.runtime.startup.make_groups import split
from pycoll.types import Kind

_LISTEN_S = 0.5  # for the reason of a failure elsewhere
_POLL_S = 0.002
_MAX_BOUND = 128
_MOST_OF_LEAVING = 255  # bytes; kTextBytes of csrc/memory/control.h, but for the end
_MOST_OF_REFUSAL = 400  # bytes; kRefusalBytes, but for the ranks that pass it on, named before it
_ALONE = (PeerRejected, ArgumentError, CommClosed, ConcurrentUseError, ForkedError)
"""Errors that leave a communicator as it is."""


class NodeSession(Session):
    """The ranks of one host; its reports use the numbers that ranks have in the whole."""

    members: list[int]

    def error(self, kind: str, text: str) -> CollError:
        """Make the exception for a failure of the engine."""
        if kind == "PeerRejected":
            who, _, why = text.partition(": ")
            passed_on = why.startswith("rank ") and " refused its arguments" in why
            number = int(who.split()[1])
            text = (
                why
                if passed_on
                else text.replace(f"rank {number}", f"rank {self.members[number]}", 1)
            )
        report = self._engine.report() if self._engine else None
        for rank in report["ranks"] if report else ():
            rank["rank"] = self.members[rank["rank"]]
            if rank["waiting_peer"] >= 0:
                rank["waiting_peer"] = self.members[rank["waiting_peer"]]
        return describe(kind, text, report)


class TwoLevelSession(MpiSession):
    """Messages between hosts, and shared memory inside them where a call can use it."""

    messages_kind = "two levels over"
    may_leave_early = False  # ranks of a host agree in shared memory anyway

    def __init__(
        self,
        job: MpiJob,
        members: list[int],
        rank: int,
        context: int,
        config: Config,
        node: NodeSession,
        topology: Topology,
    ) -> None:
        """Join; see `MpiSession`. The node session becomes this one's own."""
        self.node = node
        self.topology = topology
        node.members = list(topology.mates)
        super().__init__(job, members, rank, context, config)
        atexit.unregister(node._at_exit)  # it ends with this one
        self.memory: Memory = node.memory
        self._binder = Binder(topology, node.engine, self.engine, config.cell_bytes)
        self._bound: dict[tuple[CallSpec, bool], _C.StagedCall] = {}
        self._calls: CallThread | DeferredCalls | None = None
        self._last: Future | None = None

    def use(self, tuning: Tuning | None, sharing: Sharing | None) -> None:
        """See `Session.use`."""
        super().use(tuning, sharing)
        self.node.use(None, sharing)

    def _runner(self) -> Any:
        self._two = _C.TwoLevelEngine(self.node.engine, self._engine)
        return self._two

    @property
    def transport(self) -> str:
        """How the ranks reach each other."""
        sizes = "+".join(str(len(group)) for group in self.topology.groups)
        return f"{self.job.library} between hosts of {sizes} ranks, shared memory inside"

    def has_two_levels(self, choice: Choice) -> bool:
        """Tell whether a call goes through hosts first."""
        return self.topology.takes(choice)

    def start(self, prepared: Prepared, limit: float, async_op: bool) -> Any:
        """Run a prepared call, in two levels if it can be."""
        site = self.refusing(self.site)
        call = self.refusing(lambda: self._binding(prepared))
        if not async_op and (self._last is None or self._last.done()):
            return self._run(call, prepared, limit, site)
        if self._calls is None:
            threads = self.job.threads
            self._calls = CallThread(OWN_THREAD) if threads else DeferredCalls()
        two = self._two  # not `self`, which the future would keep in a cycle
        two.queue(1)
        self._last = self._calls.submit(self._run, call, prepared, limit, site)
        self._last.add_done_callback(lambda _: two.queue(-1))
        work = TwoLevelWork(self._last, self._calls, self._interrupted)
        return work if async_op else work.wait()

    def settle(self, timeout: float | None = None) -> None:
        """Let the calls in the background end, or so much time go by."""
        if self._last is not None:
            if isinstance(self._calls, DeferredCalls):
                self._calls.make()
            try:
                wait_for([self._last], timeout)
            except BaseException as error:
                self._interrupted(type(error).__name__)
                raise

    def _run(self, call: _C.StagedCall, prepared: Prepared, limit: float, site: int) -> Any:
        try:
            self._two.run(call, prepared.in_ptr, prepared.out_ptr, site, limit)
        except _C.EngineError as error:
            raise self._failure(*error.args, prepared) from None
        except BaseException as error:  # an interrupt ends the engine that it meets
            _C.never_free(prepared)
            self._interrupted(type(error).__name__)
            raise
        return prepared.finished()

    def remembered(self, prepared: Prepared) -> _C.StagedCall:
        """Return what runs a call: in two levels if that gives its bits, else by messages."""
        spec = prepared.spec
        if spec is None:  # blocks of different sizes
            return self._binder.by_messages(prepared.binding, *self._agreed(prepared))
        key = spec, prepared.two_levels
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= _MAX_BOUND:
                self._bound.clear()
            two_levels = prepared.two_levels and self.topology.gives(spec)
            staged = self._binder.staged(spec) if two_levels else None
            found = staged or self._binder.by_messages(prepared.binding, *self._agreed(prepared))
            self._bound[key] = found
        return found

    def _binding(self, prepared: Prepared) -> _C.StagedCall:
        try:
            return self.remembered(prepared)
        except _C.EngineError as error:
            raise describe(*error.args, None) from None

    def _agreed(self, prepared: Prepared) -> tuple[int, int]:
        return prepared.binding.descriptor, prepared.binding.count

    def _fail(self, kind: str, text: str) -> None:
        if kind == "Interrupted":  # the exception is pending
            return self._interrupted("KeyboardInterrupt")
        raise self._failure(kind, text, None)

    def _interrupted(self, name: str) -> None:
        self._tell("Revoked", f"rank {self.rank} was interrupted ({name})")

    def _failure(self, kind: str, text: str, prepared: Prepared | None) -> CollError:
        inside = self._two.failed_inside
        error = (self.node if inside else self).error(kind, text)
        if inside and self.observer is not None:
            self.observer.failed(error, None)
        return error if isinstance(error, _ALONE) else self._failed(error, prepared)

    def _failed(self, error: CollError, prepared: Prepared | None) -> CollError:
        """Tell all ranks; return the first failure, which another rank may know."""
        if isinstance(error, Revoked):
            until = time.monotonic() + _LISTEN_S
            while time.monotonic() < until:
                try:
                    self.guard(self.engine.poll)
                except CollError as first:
                    error = first
                    break
                time.sleep(_POLL_S)
        _C.never_free(prepared)
        self._tell(type(error).__name__, str(error))
        return error

    def _tell(self, name: str, text: str) -> None:
        self.engine.raise_on_all(name, text)
        if self.node.engine.report() is None:
            self.node.abort(text)

    def messaging(self, function: Any, *args: Any) -> Any:
        """Call what moves messages, and turn its failures into pycoll's exceptions."""
        return self._heard_here(super().messaging, function, *args)

    def _heard_here(self, function: Any, *args: Any) -> Any:
        """Let the failure of a message also reach the ranks of this host in shared memory."""
        try:
            return function(*args)
        except BaseException as error:
            if self._engine is not None and self._engine.failed:
                if self.node.engine.report() is None:
                    self.node.abort(str(error) or f"rank {self.rank} was interrupted")
            raise

    def _refuse(self, text: str) -> None:
        text = cut(text, _MOST_OF_REFUSAL)
        self.settle()  # the calls before this one come first
        self.node.guard(self.node.engine.refuse, text, 0)  # first: they then listen to MPI
        super()._refuse(text)

    def make_group(self, group: list[int] | None) -> Session | None:
        """Make the session of a part of the ranks: on one host, of all ranks, or by messages."""
        mates, whole = self.topology.mates, list(range(self.world_size))
        kinds = [group is None or set(group) <= set(mates), group == whole]
        found = self.call(Kind.ALL_GATHER, np.array([kinds]), None, "sum", 0, None)
        on_host, of_all = found.all(axis=0)
        if on_host:
            color = None if group is None else min(group)
            key = 0 if group is None else group.index(self.rank)
            return self._inside(lambda: split(self.node, color, key))
        if not of_all:
            return super().make_group(group)
        node = self._inside(lambda: split(self.node, 0, 0, NodeSession))
        try:
            context = self.new_context()
            place = self.job, self.members, self.rank, context, self.config
            return self.on_all(lambda: TwoLevelSession(*place, node, self.topology))
        except BaseException:
            node.close()
            raise

    def _inside(self, make: Callable[[], Session | None]) -> Any:
        """Make a group of ranks of this host; if that fails on any host, no rank gets one."""
        made = error = None
        try:
            made = make()
        except Exception as found:
            if isinstance(found, CollError) and self.node.engine.report() is not None:
                raise self._failed(found, None) from None
            error = found

        def outcome() -> Session | None:
            if error is None or isinstance(error, PeerRejected):
                return made  # the rank that cannot tells all others why
            raise error

        made = self.on_all(outcome)
        if error is not None:
            raise error
        return made

    def abort(self, reason: str) -> None:
        """See `pycoll.Communicator.abort`."""
        super().abort(reason)
        self.node.abort(reason)

    def leave(self, reason: BaseException | str) -> None:
        """Tell the peers why this rank leaves; those elsewhere no more than those of this host."""
        text = why_left(reason) if isinstance(reason, BaseException) else reason
        text = cut(text, _MOST_OF_LEAVING)
        super().leave(text)
        self.node.leave(text)

    def prepare_for_exit(self) -> None:
        """Make what is under way; from then on there is no thread to make calls."""
        if self._calls is not None:
            self._calls.shutdown()
        self._calls = DeferredCalls()
        super().prepare_for_exit()

    def end(self) -> None:
        """See `Session.end`."""
        self._finish_calls()
        self.guard(self._two.check_unused)
        super().end()

    def _finish_calls(self) -> None:
        if self._engine is not None and self._calls is not None:
            self._calls.shutdown()
            self._calls = None

    def close(self) -> None:
        """See `pycoll.Communicator.close`."""
        self._finish_calls()
        self.node.close()  # first: it refuses while a thread is inside a call
        super().close()
