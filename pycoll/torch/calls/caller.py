"""How a process group makes its calls: at once, in the background, or like an earlier call.

What a call needs besides its addresses is bound when it is first made. A later call like it goes
from plain tensors straight to the engine. If anything about its tensors or the group is unusual,
it is prepared like a first one, which handles all cases.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from pycoll import _C
from pycoll.errors import ArgumentError, CollError, in_words
from pycoll.runtime.sessions.message_session import MpiSession
from pycoll.runtime.sessions.reports import what_ranks_do
from pycoll.runtime.sessions.session import Session
from pycoll.torch.calls.background import Background
from pycoll.torch.calls.prepare import Calls, ListCalls, MultiHostCalls
from pycoll.torch.calls.turns import Job, Prepare, Turn
from pycoll.torch.calls.work import PendingWork, done, keep_in_flight
from pycoll.torch.errors import as_torch, of_job
from pycoll.torch.tensors.devices import DeviceCalls
from pycoll.torch.tensors.layout import DTYPES, IN_PLACE, Request, Tensors, as_bytes
from pycoll.types import Kind, ReduceOp

Key = tuple[Kind, torch.dtype, int, ReduceOp | None, int]
"""What repeated calls share: kind, type and count of all blocks, operation, root."""

_STRIDED = torch.strided
_MAX_KEPT = 1024
_OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.AVG: dist.ReduceOp.AVG}  # of repeated calls
_NOT_RECORDED = nullcontext()


def _profiling() -> bool:
    return getattr(profiler, "_is_profiler_enabled", False)


def _recorded(what: str, tensors: Tensors, about: dict[str, Any]) -> AbstractContextManager:
    """Put a call into the trace of a profiler, which sees no call of a group in Python.

    Its name, shapes and types are as those of PyTorch's own backends: ``gloo:all_reduce``.
    """
    return _RecordFunctionFast(f"pycoll:{what}", tensors, about) if _profiling() else _NOT_RECORDED


def _lies_in_storage(view: torch.Tensor, held: int) -> bool:
    """Whether a view lies in the memory of its storage, of `held` bytes, if there is any."""
    before = view.storage_offset() * view.element_size()
    return before + view.nbytes <= held and view.data_ptr() != before


def _address(x: torch.Tensor) -> int:
    """Return the address of a tensor whose memory is its plain elements in order; 0 of others."""
    if (
        x.layout is not _STRIDED
        or x.is_nested
        or not x.is_contiguous()
        or not x.is_cpu
        or x.is_neg()  # the sign is not in the memory
        or (held := x.untyped_storage().nbytes()) < x.nbytes  # some was freed
        or (x.storage_offset() and not _lies_in_storage(x, held))
    ):
        return 0
    return x.data_ptr()


def abort_if_interrupted(owner: weakref.ref[Session], error: BaseException) -> None:
    """End a group, if it still exists, because of an interrupt; other errors do not count.

    Else the peers would match a later call of this rank with the interrupted one.
    """
    if isinstance(error, Exception):
        return
    session = owner()
    with contextlib.suppress(Exception):  # they know of it if it came inside the engine
        if session is not None:
            session.abort(f"rank {session.rank} was interrupted ({type(error).__name__})")


def _describe(owner: weakref.ref[Session]) -> str:
    """Say what ranks do, as far as it is known here; for a call that goes on."""
    session, lines = owner(), []
    with contextlib.suppress(CollError):  # the group has ended
        lines = [] if session is None else what_ranks_do(session)
    return "\n".join([" meanwhile:", *(f"  {line}" for line in lines)]) if lines else ""


class SymmetricTensors:
    """The tensors of a process group in symmetric memory.

    Attributes:
        leaving: Registered tensors that `move_back` has to move back.
    """

    def __init__(self, calls: Calls, lock: threading.RLock, background: Background) -> None:
        """Serve a group; `lock` keeps other threads out of its session."""
        self._calls, self._lock, self._background = calls, lock, background
        self.leaving: deque[torch.Tensor] = deque()

    def empty(self, size: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor in symmetric memory; elsewhere between hosts."""
        shape = (size,) if isinstance(size, int) else tuple(size)
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._calls.direct or nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        self._calls.symmetric = True
        block = self._calls.session.memory.empty(nbytes, np.uint8)
        return torch.from_numpy(block).view(dtype).view(shape)

    def transfer(self, how: str, tensor: torch.Tensor) -> None:
        """Move a tensor into symmetric memory (`how` is "register") or back ("unregister")."""
        if not self._calls.direct:
            return  # messages between hosts need no such thing
        self._background.finish()  # queued calls may use it
        if not tensor.is_contiguous():
            raise ArgumentError("the tensor is not contiguous; only one stretch can be moved")
        flat = as_bytes(tensor.detach())
        with self._lock:
            getattr(self._calls.session.memory, how)(flat)
        self._calls.symmetric = True

    def move_back(self) -> None:
        """Move back the leaving tensors; one that cannot be moved stays, which does no harm."""
        while self.leaving:
            with contextlib.suppress(Exception):
                self.transfer("unregister", self.leaving.popleft())


class Caller:
    """Makes the calls of a process group.

    Attributes:
        session: The ranks and their engine; `rank` and `size` are its.
        name: Name of the group, for messages.
        lock: Lets one thread at a time into the engine, which refuses a second one.
        calls: The collectives on tensors of the host.
        lists: Those on lists of tensors.
        devices: Those on tensors of CUDA devices.
        background: The asynchronous calls.
        symmetric: The tensors in symmetric memory.
        kept: Calls that `repeat` can make.
        sums: Those of them that ``dist.all_reduce`` makes again: with a tensor and the very object
            ``ReduceOp.SUM`` or ``ReduceOp.AVG`` it makes the call, if it asks for no more than
            that, and tells whether it was made. Two frames have to be below that of the program.
        abort_if_interrupted: Ends the group if an error is an interrupt.
        for_cpp: Whether hooks in C++ may read futures; see `pycoll.torch.Options`.
    """

    def __init__(
        self, session: Session, name: str, order: str = "tree", for_cpp: bool = False
    ) -> None:
        """Wrap a session; `order` is that of reductions."""
        self.session = session
        self.for_cpp: bool = for_cpp
        self.name = name
        self.rank: int = session.rank
        self.size: int = session.world_size
        self._about = {"Process Group Name": name, "Rank": self.rank, "Group size": self.size}
        self.lock: Any = threading.RLock()
        kind = MultiHostCalls if isinstance(session, MpiSession) else Calls
        self.calls: Calls | MultiHostCalls = kind(session, order)
        self.lists: ListCalls = ListCalls(self.calls)
        self.devices: DeviceCalls = DeviceCalls(session, order)
        # Background threads must not keep a session that is dropped.
        self.abort_if_interrupted: Callable[[], None] = functools.partial(
            abort_if_interrupted, weakref.ref(session)
        )
        describe = functools.partial(_describe, weakref.ref(session))
        self.background: Background = Background(
            f"pycoll-{name}", self.abort_if_interrupted, describe
        )
        self.symmetric: SymmetricTensors = SymmetricTensors(self.calls, self.lock, self.background)
        self.kept: dict[Key, _C.AddressCall] = {}
        self.turn: Turn = Turn()
        queued, limit = self.background.jobs, session.config.timeout_s
        self.sums: _C.InPlaceCalls = _C.InPlaceCalls(self.lock, queued, self.calls, profiler, limit)

    @property
    def timeout_s(self) -> float:
        """Longest time that calls wait for their peers by default."""
        return self.sums.timeout_s

    @timeout_s.setter
    def timeout_s(self, limit: float) -> None:
        self.sums.timeout_s = limit

    def request(self, kind: Kind, opts: Any, op: ReduceOp | None = None, root: int = 0) -> Request:
        """Return a call as PyTorch's options describe it."""
        return Request(kind, op, root, self._site(), self.limit(opts))

    def _site(self) -> int:
        return self.turn.site or self.calls.sites.here()

    def limit(self, opts: Any) -> float:
        """Return the seconds that a call may wait for its peers."""
        timeout = opts.timeout
        return self.timeout_s if timeout.days < 0 else timeout.total_seconds()  # -1 ms: not set

    def run(self, request: Request, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        """Make a collective call on the host, or on a device if one of its tensors is there."""
        on_host = (x is None or x.is_cpu) and (out is None or out.is_cpu)
        (self.calls if on_host else self.devices).run(request, x, out)

    def error(self, error: CollError, what: str) -> dist.DistBackendError:
        """Return an error of an operation as one of PyTorch."""
        where = f"{what} on rank {self.rank} of {self.size} in group {self.name!r}"
        return as_torch(error, where + of_job(self.session.job_ranks))

    def fail(self, failure: _C.EngineError, what: str) -> NoReturn:
        """Raise an error of the engine as one of PyTorch."""
        error = self.session.error(*failure.args)
        raise self.error(error, what) from error

    def start(
        self,
        what: str,
        prepare: Prepare,
        opts: Any,
        key: Key | None = None,
        like: torch.Tensor | None = None,
        copies: bool = False,
    ) -> dist.Work:
        """Make a call, at once or in the background as the options say.

        Args:
            what: Name of the operation, for messages.
            prepare: Checks the arguments; returns the call and the tensors of its result.
            opts: PyTorch's options of the call.
            key: See `repeat`; None if calls like it are not repeated.
            like: A tensor of the call, if there is a key.
            copies: Whether `prepare` copies tensors that calls before it may have to write.

        Whoever calls this must pass an interrupt to `abort_if_interrupted`.
        """
        if self.symmetric.leaving and not self.background.busy:  # else it would wait for them
            self.symmetric.move_back()
        try:
            job, tensors = prepare()
            job = self.turn.job(prepare, self._site()) if copies else job
            job = job if key is None else self._keep(job, key, like)
        except CollError as error:
            if isinstance(error, ArgumentError):
                self._refuse(what, error)
            raise self.error(error, what) from error
        except Exception as error:  # whatever it is, the peers must not wait for this rank
            text = f"arguments that cannot be used: {in_words(error)}"
            self._refuse(what, refusal := ArgumentError(text))
            raise self.error(refusal, what) from error
        if getattr(opts, "asyncOp", True):
            work = self._submit(what, job, tensors)
            work.for_cpp = self.for_cpp
            return keep_in_flight(work, tensors)
        self.run_now(what, job, tensors)
        ended = done(tensors)
        ended.for_cpp = self.for_cpp
        return ended

    def _submit(self, what: str, job: Job, tensors: Tensors) -> PendingWork:
        try:
            fence = self.devices.fence(tensors)
            ordered = job if fence is None else fence.around(job)
            return self.background.submit(lambda: self._run(what, ordered, tensors), tensors, fence)
        except CollError as error:
            raise self.error(error, what) from error

    def run_now(self, what: str, job: Job, tensors: Tensors) -> None:
        """Run a call after those in the background."""
        if self.background.busy:
            self._submit(what, job, tensors).wait()
        else:
            self._run(what, job, tensors)

    def _run(self, what: str, job: Job, tensors: Tensors) -> None:
        try:
            with self.lock, _recorded(what, tensors, self._about):
                self._take_part(job)
        except CollError as error:
            raise self.error(error, what) from error

    def _take_part(self, job: Job) -> None:
        """Run a job; if it fails before it makes a call, its error reaches the peers."""
        made = self.session.engine.iteration
        try:
            job()
        except Exception as error:
            ours = isinstance(error, ArgumentError) or not isinstance(error, CollError)
            if ours and self.session.engine.iteration == made:
                with contextlib.suppress(CollError):  # the group has ended
                    self.calls.refuse(error, self.session.call_site)
            raise

    def in_parts(self, job: Job, count: int) -> Job:
        """Return a job of `count` calls that ends the group if it fails between two of them."""

        def whole() -> None:
            try:
                job()
            except CollError:  # the peers know of it
                raise
            except Exception as error:
                with contextlib.suppress(CollError):
                    self.session.abort(f"rank {self.rank} has failed: {in_words(error)}")
                raise

        return job if count == 1 else whole

    def _refuse(self, what: str, error: ArgumentError) -> None:
        """Take part in the call that the peers make, by refusing it with an error."""
        site = self.calls.sites.here()
        self.run_now(what, lambda: self.calls.refuse(error, site), [])

    def repeat(
        self, key: Key, x: torch.Tensor | None, out: torch.Tensor, opts: Any
    ) -> dist.Work | None:
        """Make a synchronous call like an earlier one.

        Args:
            key: What the two calls share.
            x: The input, whose type and size fit the output; None where there is none.
            out: The output, or the input itself.
            opts: PyTorch's options of the call.

        Returns:
            The call's work, or None: nothing was done.
        """
        call = self.kept.get(key)
        if (
            call is None
            or opts.asyncOp
            or self.background.jobs
            or self.calls.symmetric
            or _profiling()
            or not (out_pointer := _address(out))
        ):
            return None
        if x is out:
            if key[0] not in IN_PLACE:
                return None
            x_pointer = out_pointer
        elif x is None:
            x_pointer = 0
        elif not (x_pointer := _address(x)) or not (
            x_pointer + x.nbytes <= out_pointer
            or out_pointer + out.nbytes <= x_pointer
            or self.calls.is_own_block(key[0], x, out)
        ):
            return None
        site, limit = self.calls.sites.here(), self.limit(opts)
        try:
            with self.lock:
                call(x_pointer, out_pointer, site, limit)
        except _C.EngineError as failure:
            self.fail(failure, key[0].name.lower())
        return done([out])

    def _keep(self, job: Job, key: Key, like: torch.Tensor) -> Job:
        """Return a job that leaves its call to `repeat`, and to `sums`."""
        plain = like.layout is _STRIDED and like.is_cpu
        if not plain or key[1] not in DTYPES or not self.calls.direct or self.for_cpp:
            return job
        kind, dtype, count, op, root = key
        known = DTYPES[dtype]

        def whole() -> None:  # runs with the lock held
            job()
            if key not in self.kept and len(self.kept) < _MAX_KEPT:
                same = kind, int(known), count, op, root, False
                bound = self.calls.bind(same, known.itemsize, None if op is None else known)
                self.kept[key] = call = _C.AddressCall(self.session.engine, bound)
                if kind is Kind.ALL_REDUCE and op is not None:
                    self.sums.keep(like, _OPS[op], call)

        return whole

    def close(self) -> None:
        """Finish what runs in the background and leave the group."""
        self.kept.clear()
        self.sums.clear()
        if self.background.forked:  # the locks may be those of threads of the parent
            self.session.close()
            return
        self.background.stop()
        self.symmetric.move_back()
        with self.lock:  # another thread may be inside a call
            self.session.close()
