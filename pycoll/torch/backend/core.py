"""What every operation of a process group rests on: its session, its errors, how calls are run."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.errors import ArgumentError, CollError, in_words
from pycoll.runtime.sessions.message_session import MpiSession
from pycoll.runtime.sessions.session import Session
from pycoll.torch.backend.errors import as_torch
from pycoll.torch.backend.profiling import recorded
from pycoll.torch.backend.work_lifetimes import keep_in_flight
from pycoll.torch.calls.background import Background
from pycoll.torch.calls.interrupts import tell_interrupt
from pycoll.torch.calls.prepare import Calls, HostCalls
from pycoll.torch.calls.work import PendingWork, Tensors, done
from pycoll.torch.tensors.devices import DeviceCalls, kinds
from pycoll.torch.tensors.symmetric_tensors import SymmetricTensors

Job = Callable[[], Any]


class _StandIn(c10d.Backend):
    def name(self) -> str:
        return "pycoll"

    getBackendName = name


class Core(SymmetricTensors, dist.ProcessGroup):
    """A process group without operations: what c10d asks of any group, and `_start`."""

    def __init__(self, session: Session, store: dist.Store, name: str) -> None:
        """Wrap a session; see `pycoll.torch.backend.group.create`."""
        super().__init__(session.rank, session.world_size)
        self._rank, self._size = session.rank, session.world_size
        self._session = session
        self._calls = (HostCalls if isinstance(session, MpiSession) else Calls)(session)
        self._store, self._name, self._desc = store, name, "undefined"
        self._timeout_s = session.config.timeout_s
        self._lock = threading.RLock()  # one thread at a time in the engine, which refuses itself
        self._devices = DeviceCalls(session)
        # Its threads do not keep a session that is dropped.
        self._ended_by = functools.partial(tell_interrupt, weakref.ref(session))
        self._background = Background(f"pycoll-{name}", self._ended_by)
        self._closed = False
        self._open_symmetric()
        self._stand_in()

    def _stand_in(self) -> None:
        """Register a backend without operations, which PyTorch 2.15 attaches its hooks to."""
        try:
            self._hooked = _StandIn(self._rank, self._size)
        except TypeError:  # before 2.15
            return
        for device in self._device_types:
            self._register_backend(device, self.BackendType.CUSTOM, self._hooked)
        self._set_default_backend(self.BackendType.CUSTOM)

    # ---- running calls

    def _start(self, what: str, prepare: Callable[[], tuple[Job, Tensors]], opts: Any) -> dist.Work:
        """Run a call, at once or in the background as `opts` says.

        Args:
            what: Name of the operation, for messages.
            prepare: Checks the arguments; returns the call and the tensors of its result.
            opts: PyTorch's options of the call.

        An interrupt has to end the group; see `pycoll.torch.calls.interrupts`.
        """
        if self._leaving and not self._background.busy:  # else it would wait for earlier calls
            self._move_back()
        try:
            job, tensors = prepare()
        except CollError as error:
            if isinstance(error, ArgumentError):
                self._refuse(what, error)
            raise self._error(error, what) from error
        except Exception as error:  # whatever it is, the peers must not wait for this rank
            text = f"arguments that cannot be used: {in_words(error)}"
            self._refuse(what, refusal := ArgumentError(text))
            raise self._error(refusal, what) from error
        if getattr(opts, "asyncOp", True):
            return keep_in_flight(self._submit(what, job, tensors), tensors)
        self._now(what, job, tensors)
        return done(tensors)

    def _submit(self, what: str, job: Job, tensors: Tensors) -> PendingWork:
        try:
            fence = self._devices.fence(tensors)
            placed = job if fence is None else fence.around(job)
            return self._background.submit(lambda: self._run(what, placed), tensors, fence)
        except CollError as error:
            raise self._error(error, what) from error

    def _now(self, what: str, job: Job, tensors: Tensors) -> None:
        """Run a call behind those in the background."""
        if self._background.busy:
            self._submit(what, job, tensors).wait()
        else:
            self._run(what, job)

    def _run(self, what: str, job: Job) -> None:
        try:
            with self._lock, recorded(what):
                self._take_part(job)
        except CollError as error:
            raise self._error(error, what) from error

    def _take_part(self, job: Job) -> None:
        """Run a job; if it fails before it makes a call, the peers of that call hear why."""
        made = self._session.engine.iteration
        try:
            job()
        except Exception as error:
            ours = isinstance(error, ArgumentError) or not isinstance(error, CollError)
            if ours and self._session.engine.iteration == made:
                with contextlib.suppress(CollError):  # the group is at an end
                    self._calls.refuse(error, self._session.place)
            raise

    def _in_parts(self, job: Job, count: int) -> Job:
        """Return a job of several calls that ends the group if it fails between two of them.

        Args:
            job: The job.
            count: Number of its calls.
        """

        def whole() -> None:
            try:
                job()
            except CollError:  # the peers know of it
                raise
            except Exception as error:
                with contextlib.suppress(CollError):
                    self._session.abort(f"rank {self._rank} has failed: {in_words(error)}")
                raise

        return job if count == 1 else whole

    def _calls_for(self, *tensors: torch.Tensor | None) -> Calls | DeviceCalls:
        """Return what runs a call: if one of its tensors is on a device, the device."""
        on_host = all(tensor is None or tensor.is_cpu for tensor in tensors)
        return self._calls if on_host else self._devices

    def _error(self, error: CollError, what: str) -> dist.DistBackendError:
        where = f"{what} on rank {self._rank} of {self._size} in group {self._name!r}"
        return as_torch(error, where)

    def _refuse(self, what: str, error: ArgumentError) -> None:
        """Take part in the call that the peers make by telling them that it cannot be made."""
        site = self._calls.sites.here()
        self._now(what, lambda: self._calls.refuse(error, site), [])

    def _limit(self, opts: Any) -> float:
        """Return the seconds that a call may wait for its peers."""
        timeout = opts.timeout
        return self._timeout_s if timeout.days < 0 else timeout.total_seconds()  # -1 ms: not set

    # ---- what c10d asks

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def name(self) -> str:
        """Return the name of the backend."""
        return "pycoll"

    getRank, getSize, getBackendName, _get_backend_name = rank, size, name, name

    @property
    def group_name(self) -> str:
        """Name by which functional collectives find the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Description that was given to ``new_group``."""
        return self._desc

    def getGroupName(self) -> str:
        """Return the name; for C++."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Rename the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the description; for C++."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Describe the group."""
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in kinds()]

    @property
    def supports_splitting(self) -> bool:
        """Whether ``split_group`` works; make groups with ``new_group``."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        """Whether ``shrink_group`` works; after a failure start the ranks again."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """Whether single calls can be collected and run together."""
        return False

    @property
    def supports_time_estimate(self) -> bool:
        """Whether PyTorch can ask how long collectives will take."""
        return False

    @property
    def options(self) -> c10d.Backend.Options:
        """What backends of PyTorch's own tell: the timeout and which ranks the group has."""
        options = c10d.Backend.Options(self.name(), timedelta(seconds=self._timeout_s))
        if hasattr(options, "group_name"):  # from PyTorch 2.9 or so on
            options.global_ranks_in_group = dist.get_process_group_ranks(self)
            options.group_name = self._name
        return options

    def _get_backend(self, device: torch.device) -> Core:
        if torch.device(device).type not in kinds():
            raise RuntimeError(
                f"no backend for {device} in this group; this pycoll moves tensors of "
                f"{' and '.join(kinds())}"
            )
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._session.engine.iteration

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: ranks count from the same number."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        if self._background.busy:
            self._background.submit(lambda: None, []).wait()

    def get_group_store(self) -> dist.Store:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest time that calls wait for their peers."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Finish what runs in the background and leave the group; harmless if repeated."""
        if not self._closed:
            self._closed = True
            if self._background.forked:  # the locks may be those of threads of the parent
                self._session.close()
                return
            self._background.stop()
            self._move_back()
            with self._lock:  # another thread may be inside a call
                self._session.close()

    def abort(self) -> None:
        """Make every rank's present or next call raise, and leave the group."""
        if not self._closed:
            self._session.abort("abort was called on the process group")
            self.shutdown()
