"""One rank's side of a communicator: its engine, its plans, its memory, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from array import array
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

import numpy as np

from pycoll import _C, algorithms
from pycoll.config import Config, check_timeout
from pycoll.errors import ArgumentError, CollError, CommClosed, in_words, sendable
from pycoll.runtime.arrays.host_arrays import on_device
from pycoll.runtime.arrays.layouts import ChunkLayout
from pycoll.runtime.arrays.numbers import NUMBERS, as_array
from pycoll.runtime.arrays.symmetric_memory import Memory
from pycoll.runtime.calls.call_sites import CallSites
from pycoll.runtime.calls.functions import function_for, own_op, reduce_with
from pycoll.runtime.calls.other_arguments import explained
from pycoll.runtime.calls.plans import CallSpec, PlanCache, barrier_spec
from pycoll.runtime.calls.prepare import Caller
from pycoll.runtime.calls.prepared import CallRequest, Prepared
from pycoll.runtime.calls.work import QueuedCall, Work
from pycoll.runtime.selection.select import Choice
from pycoll.runtime.selection.tuning_table import Tuning
from pycoll.runtime.sessions.background import QueuedCalls
from pycoll.runtime.sessions.p2p import TaggedMessages
from pycoll.runtime.sessions.reports import describe, raising, why_left
from pycoll.runtime.sessions.shutdown import freed, leave_at_exit
from pycoll.runtime.startup.hosts import Sharing
from pycoll.schedule.ir import Algorithm
from pycoll.types import Kind

_T = TypeVar("_T")
_BUFFERS = bytes, bytearray, memoryview, array  # `_C` makes arrays of them


def _no_devices(session: Session) -> Any:
    raise ArgumentError("arrays on a device are for communicators; these ranks take CPU arrays")


class Session(QueuedCalls, TaggedMessages):
    """Everything one rank needs to take part in one communicator.

    Whatever can raise on one rank alone belongs into `refusing`: a peer that hears nothing takes
    the next call of this rank, which may be just like this one, for its part of this one.
    """

    def __init__(
        self,
        control: _C.Control,
        memory: Memory,
        rank: int,
        world_size: int,
        config: Config,
        threads: bool = False,
    ) -> None:
        """Join.

        Raises:
            TransportError: If the memory cannot be had or does not fit these arguments.
        """
        self.memory = memory
        self.threads = threads
        self.control = control
        self.cookie = control.sight().cookie
        engine = raising(
            _C.Engine, control, memory.heap, rank, timeout_s=config.timeout_s, threads=threads
        )
        reads = config.single_copy == "auto"
        plans = PlanCache(engine, rank, world_size, single_copy=reads)
        caller = Caller(plans, memory, by_size=config.symmetric == "numpy")
        self.offers: _C.Offers = _C.Offers.WANTED if reads and not threads else _C.Offers.NEVER
        postbox = _C.Postbox(engine, self.offers)
        self._open(rank, world_size, config, engine, postbox, caller)

    fast: _C.Fastcall | None = None  # calls that are remembered; none where `_open` is interrupted
    _at_exit: Any = None
    tuning: Tuning | None = None  # what measurement says about the choice of algorithms
    sharing: Sharing | None = None  # of cores, as far as ranks have told each other
    control: _C.Control | None = None  # where the ranks share memory
    members: list[int] | None = None  # rank in the job of each rank of a group
    job_ranks: list[int] | None = None  # likewise, where `members` are numbers on the transport
    transport = "shared memory"
    closed_because = "this communicator has been closed"
    has_raised: bool = False  # a failure of the engine, to the user
    for_users = False  # a communicator's: it stays open while the program's exit handlers run
    end_numpy: Any = staticmethod(lambda: None)  # ends that NumPy's arrays come from `memory`
    cookie: int = 0  # what tells this communicator from all others, alike on its ranks
    link: Any = None  # to the launcher of a job to which ranks can be added
    epoch = 0  # number of the communicator among those that grow has made for the job
    can_shrink = False  # a communicator can go on without ranks that died or left
    internal: tuple[str, ...] = ("pycoll.",)  # begin the names of modules that are not the user's
    follows = False  # it took the place of the job's communicator, of which ranks were lost
    observer: Any = None  # hears failed(error, report), was_split(child), followed() and ended()
    device: Any = None  # this rank's side of calls on device arrays, once there was one
    open_device: Any = staticmethod(_no_devices)  # a communicator puts there what makes it

    def _open(
        self, rank: int, world_size: int, config: Config, engine: Any, postbox: Any, caller: Caller
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self._in_flight: deque[QueuedCall] = deque()  # in the order of the queue
        self.under_way: set[Any] = set()
        self._ahead: deque[Any] = deque()
        self._adrift: list[Any] = []  # what calls need that may be in the queue, or may be not
        # Made of some of these ranks, by the number of the split, which is the same on all ranks.
        self.children: MutableMapping[int, Session] = weakref.WeakValueDictionary()
        self.splits = 0
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # that have not closed it
        # What calls of several parts keep for the next like them.
        self.kept: dict[tuple[Any, ...], Any] = {}
        self._engine, self._caller = engine, caller
        self.runner: Any = self._runner()
        self.sites: CallSites | None = CallSites(self.runner.site, self.internal)
        self.fast = _C.Fastcall(
            self.runner, self.memory.heap, weakref.ref(self), freed, self._in_flight, QueuedCall
        )
        self._open_postbox(postbox)
        self._at_exit = functools.partial(leave_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def _runner(self) -> Any:
        return self._engine

    def __del__(self) -> None:
        """Close a communicator that was dropped."""
        if getattr(self, "_engine", None) is not None:
            self.close()

    @property
    def engine(self) -> _C.Engine:
        """The engine.

        Raises:
            CommClosed: After `close`.
        """
        if self._engine is None:
            raise CommClosed(self.closed_because)
        return self._engine

    def give_way(self, to: str) -> None:
        """Let nobody use it any more, nor its ports: another one follows."""
        self.abort(f"rank {self.rank} called {to}")  # ranks in another call get `Revoked`
        if self.observer is not None:
            self.observer.followed()
        self.guard(self.engine.drain)

    def use(self, tuning: Tuning | None, sharing: Sharing | None) -> None:
        """Let measured times and shared cores, alike on every rank, choose from now on."""
        self.tuning, self.sharing = tuning, sharing
        world = tuning.world(self.place) if tuning is not None else None
        self.plans.use(world, sharing is not None and sharing.crowded)
        if sharing is not None:
            self.engine.share_cores(*sharing)

    @property
    def plans(self) -> PlanCache:
        """The plans of this communicator, and what their choice depends on."""
        return self._caller.plans

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of the host of each rank, from 0 in the order of the ranks."""
        return (0,) * self.world_size

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """What a measurement depends on besides the machine: transport, and ranks per host."""
        return ("threads" if self.threads else "shared memory"), (self.world_size,)

    def has_two_levels(self, choice: Choice) -> bool:
        """Tell that calls do not go through hosts first."""
        return False

    def call(
        self,
        kind: Kind,
        x: Any,
        out: Any,
        op: str,
        root: int,
        order: str | None,
        algorithm: str | Algorithm | None = None,
        timeout: float | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Run one collective; the arguments are those of `pycoll.Communicator`."""
        if type(x) in NUMBERS or isinstance(x, (list, tuple, np.generic)):
            return self._on_numbers(kind, x, out, op, root, order, algorithm, timeout, async_op)
        given_op = op
        if type(op) is not str:
            op = self.refusing(lambda: own_op(given_op))
        request = CallRequest(kind, op, root, order, algorithm)
        limit, later, on_host = self.refusing(
            lambda: (self._limit(timeout), bool(async_op), not (on_device(x) or on_device(out)))
        )
        if stream is not None or not on_host:
            side = self.refusing(lambda: self.device_side(x, out))
            return side.call(request, x, out, limit, later, stream)
        function = function_for(kind, op, x)
        if function is not None:
            return reduce_with(self, request, function, x, out, limit, later)
        prepared = self.refusing(lambda: self.prepare(request, x, out))
        result = self.start(prepared, limit, later)
        if prepared.plain and (not later or isinstance(result, Work)):
            fresh = prepared.result if out is None else None
            seen = np.asarray(memoryview(x)) if out is None and isinstance(x, _BUFFERS) else x
            like = kind, seen, out, given_op, root, order, algorithm, fresh, prepared.neutral
            self.fast.remember(self.remembered(prepared), *like)
        return result

    def _on_numbers(self, kind: Kind, x: Any, out: Any, *options: Any) -> Any:
        """Run a call on numbers, which become an array; a single one gives a single one."""
        given = self.refusing(lambda: as_array(x, filled=kind == Kind.BROADCAST))
        result = self.call(kind, given, given if out is x else out, *options)
        single = isinstance(result, np.ndarray) and result.ndim == 0 and result is not out
        return result[()] if single else result

    def remembered(self, prepared: Prepared) -> Any:
        """Return what makes calls like this one need no Python code."""
        return prepared.binding

    def start(self, prepared: Prepared, limit: float, async_op: bool) -> Any:
        """Run a prepared call, or put it in the queue."""
        held: list[_C.Hold] = []  # before it is looked up what lies where
        if prepared.registered:
            held = self.refusing(lambda: self.memory.hold(prepared.registered))
        arrays = prepared.in_ptr, prepared.out_ptr
        site, around = self.refusing(lambda: (self.site(), prepared.detours()))
        try:
            if async_op:
                return self._enqueue(prepared, *arrays, site, limit, *around)
            self.guard(self.engine.run, prepared.binding, *arrays, site, limit, *around)
        except ArgumentError as error:  # another thread has unregistered what was to be an input
            self.refused(error)
            raise
        finally:
            for hold in held:
                hold.end()
        return prepared.finished()

    def device_side(self, *given: Any) -> Any:
        """Return this rank's side of calls on arrays of a CUDA device, making it the first time."""
        if given and not any(map(on_device, given)):
            raise ArgumentError("stream= is for arrays on a CUDA device; this call has none")
        if self.device is None:
            self.device = self.open_device(self)
        return self.device

    def bind(self, spec: CallSpec, layout: ChunkLayout | None = None) -> _C.BoundCall:
        """Bind the plan of a call; of a v-variant with the layout of its chunks."""
        return self.plans.bind(spec, layout)

    def prepare(self, request: CallRequest, x: Any, out: Any) -> Prepared:
        """Check the arguments of a call and bind its plan."""
        if request.kind != Kind.BARRIER:
            return self._caller.prepare(request, x, out)
        spec = barrier_spec(algorithms.find("all_reduce", self.plans.barrier_algorithm))
        binding = self.plans.bind(spec)
        return Prepared(binding, 0, 0, None, (), True, spec=spec, two_levels=True)

    def check(self, request: CallRequest, timeout: float | None) -> tuple[int, float]:
        """Check what does not depend on the arrays; return the root and the limit of time."""
        _, root = self._caller.check_request(request)
        return root, self._limit(timeout)

    def _limit(self, timeout: float | None) -> float:
        return self.config.timeout_s if timeout is None else check_timeout(timeout)

    def guard(self, function: Any, *args: Any) -> Any:
        """Call the engine and turn its failures into pycoll's exceptions."""
        try:
            return function(*args)
        except _C.EngineError as error:
            self.has_raised = True
            raise self.error(*error.args) from None

    def _fail(self, kind: str, text: str) -> None:
        self.has_raised = True
        raise self.error(kind, text)

    def error(self, kind: str, text: str) -> CollError:
        """Make the exception for a failure of the engine."""
        report = self._engine.report() if self._engine else None
        way_on = "grow" if self.link is not None else "shrink" if self.can_shrink else ""
        error = describe(kind, text, report, self.members, way_on)
        if self.observer is not None:
            self.observer.failed(error, report)
        return error

    def site(self) -> int:
        """Return the number of the caller's source line, outside pycoll."""
        _ = self.engine  # raises CommClosed
        return self.sites.here()

    def here(self) -> str:
        """Return the caller's source line: file, line and function."""
        return self.sites.text(self.site())

    def refusing(self, prepare: Callable[[], _T]) -> _T:
        """Prepare a call; if that fails, let the peers of this call know.

        An interrupt ends the communicator, as it does inside a call.
        """
        _ = self.engine  # raises CommClosed
        try:
            return prepare()
        except Exception as error:
            self.refused(error)
            raise
        except BaseException as error:
            self.interrupted(error)
            raise

    def misused(self, text: str) -> None:
        """Raise `TypeError` for a call that does not fit its signature; let its peers know."""
        self.refused(error := TypeError(explained(text)))
        raise error from None

    def refused(self, error: Exception) -> None:
        """Let the peers of a call know of an error that has come before the engine had it."""
        self._refuse(in_words(error))

    def interrupted(self, error: BaseException) -> None:
        """Let all ranks know of an interrupt, unless they do; it is what the user gets."""
        with contextlib.suppress(CollError):
            self._interrupted(type(error).__name__)

    def _refuse(self, text: str) -> None:
        """Make all ranks leave this call."""
        self.guard(self.engine.refuse, text, self.site())

    def _interrupted(self, name: str) -> None:
        """Tell all ranks the name of the exception that has interrupted this one."""
        self.abort(f"rank {self.rank} was interrupted ({name})")

    def abort(self, reason: str) -> None:
        """See `pycoll.Communicator.abort`."""
        self.guard(self.engine.abort, sendable(str(reason)))
        if self.device is not None:
            self.device.abort()

    def leave(self, reason: BaseException | str) -> None:
        """Tell the peers why this rank leaves: an exception, or a text."""
        self.has_raised = True
        if self._engine is not None:
            text = why_left(reason) if isinstance(reason, BaseException) else sendable(reason)
            self._engine.leave(text)
            if self.link is not None:
                self.link.let_go(self)

    def prepare_for_exit(self) -> None:
        """Stop needing other threads of Python; raise ConcurrentUseError if one is in a call."""
        if self._engine is not None:
            self.guard(self._engine.hold)

    def end(self) -> None:
        """Close as a user does: wait for what was sent, and raise if it was not received."""
        self.guard(self.engine.check_unused)
        lost = self.finish_sends(self.config.timeout_s)
        self.close()
        if lost is not None:
            raise lost

    def close(self) -> None:
        """See `pycoll.Communicator.close`."""
        if self._engine is not None:
            self.guard(self._engine.check_unused)  # before anything is let go
            if self.link is not None:
                self.link.let_go(self)
            if self.device is not None:
                self.device.close()
            self.close_postbox()
            self.guard(self._engine.close)
            self.sweep()
            self.tell_of_failures()
            self._in_flight.clear()
            self._adrift.clear()
            if self.device is not None:
                self.device.free()
            if self.fast is not None:
                self.fast.forget()
            self._caller = self._engine = self._postbox = None
            self.control = self.sites = self.runner = None
            atexit.unregister(self._at_exit)
            self.kept.clear()
            self.end_numpy()
            if self.observer is not None:
                self.observer.ended()
