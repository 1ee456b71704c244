"""Run ranks in tests: as forked processes or as threads, under a deadline, leaving nothing behind.

::

    def test_sum():
        def rank(comm):
            return float(comm.all_reduce(np.ones(3))[0])

        assert run_processes(3, rank) == [3.0, 3.0, 3.0]

Processes are what users run. Threads start faster, but have one interpreter lock for all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import IO, Any, NamedTuple, TypeVar

from pycoll import _C
from pycoll.cli.job.processes import end_of
from pycoll.cli.job.rank_main import die_with
from pycoll.comm import Communicator
from pycoll.config import Config
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.symmetric_memory import Memory
from pycoll.runtime.selection.measured_choices import agree
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.sessions.shutdown import close_left_open
from pycoll.runtime.startup import mpi
from pycoll.runtime.startup.bootstrap import make_memfd
from pycoll.runtime.startup.make_groups import open_control, tell_end

GRACE_S = 5.0  # after the first failure, in which the other ranks can end by themselves
_POLL_S = 0.002
_DUMP_S = 0.3
_HEAP_BYTES = 1 << 30
T = TypeVar("T")


class RankFailed(Exception):
    """A rank raised, died or did not end; the text has its traceback, and the others in a line."""


class _Outcome(NamedTuple):
    value: Any = None
    error: str = ""  # traceback, or how the process ended
    when: float = 0.0  # of the error


def run_processes(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 20.0,
    config: Config | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Fork n ranks that call ``fn(comm, *args)`` and return what they return.

    Args:
        n: Number of ranks.
        fn: Any callable; it is inherited, so a closure will do. Its result must be picklable.
        args: Further arguments, the same on every rank.
        timeout: Seconds until all ranks are killed.
        config: Settings; by default a call waits half of `timeout` for its peers.
        may_die: Ranks whose process may end without a result. Its exit code stands for the result,
            as in `subprocess`: 3 after ``os._exit(3)``, -9 after SIGKILL.

    Returns:
        One result for each rank, in rank order.

    Raises:
        ArgumentError: If `n` is not at least 1.
        RankFailed: With the traceback of the rank that failed first, or, after `timeout`, with
            what each rank was doing.
    """
    __tracebackhide__ = True  # pytest shows the traceback of the rank instead
    config = _settings(n, timeout, config)
    children: list[_Child] = []
    with _memory() as (control_fd, heap_fd):

        def join(rank: int) -> Communicator:
            heap = _C.Heap(heap_fd, n, config.heap_bytes)
            control = open_control(control_fd, n, config)
            return Communicator(Session(control, Memory(heap, rank), rank, n, config))

        try:
            for rank in range(n):
                children.append(_Child(rank, join, fn, args))
            until = time.monotonic() + timeout
            while time.monotonic() < until and any(child.outcome is None for child in children):
                if any([c.has_failed(may_die, control_fd) for c in children]):  # all are asked
                    until = min(until, time.monotonic() + GRACE_S)
                time.sleep(_POLL_S)
            stuck = {child.rank: child.dump() for child in children if child.outcome is None}
            return _conclude([child.outcome for child in children], stuck, timeout)
        finally:
            for child in children:
                child.bury()


def run_threads(
    n: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 20.0,
    config: Config | None = None,
) -> list[T]:
    """Start n ranks as threads of this process; otherwise like `run_processes`.

    A thread cannot be killed: one that is stuck outside of pycoll outlives the deadline.
    """
    __tracebackhide__ = True  # pytest shows the traceback of the rank instead
    config = _settings(n, timeout, config)
    outcomes: list[_Outcome | None] = [None] * n
    with _memory() as (control_fd, heap_fd):
        control = open_control(control_fd, n, config)
        heap = _C.Heap(heap_fd, n, config.heap_bytes)

        def join(rank: int) -> Communicator:
            return Communicator(Session(control, Memory(heap, rank), rank, n, config, threads=True))

        def body(rank: int) -> None:
            outcomes[rank] = _attempt(rank, join, fn, args)

        ranks = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(n)]
        for thread in ranks:
            thread.start()
        until = time.monotonic() + timeout
        for thread in ranks:
            thread.join(max(0.0, until - time.monotonic()))
    dump = ""
    if any(thread.is_alive() for thread in ranks):
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            dump = file.read().decode(errors="replace")
    stuck = {rank: dump for rank, thread in enumerate(ranks) if thread.is_alive()}
    return _conclude(outcomes, stuck, timeout)


def on_hosts(hosts: Sequence[int], comm: Any = None, **settings: Any) -> Communicator:
    """Return a communicator under MPI whose ranks believe that only these share a host.

    Ranks with different numbers share no memory, as if they were on different hosts; nothing else
    in the library takes anybody's word for that.

    Args:
        hosts: A number for each rank, the same on all of them.
        comm: An mpi4py communicator; by default ``COMM_WORLD``.
        **settings: Fields of `pycoll.Config`.
    """
    world = mpi.world() if comm is None else comm
    config = replace(Config.from_env(), **settings)
    return Communicator(agree(mpi.connect(world, config, hosts)))


class _Child:
    """A forked rank."""

    def __init__(self, rank: int, join: Callable, fn: Callable, args: Sequence[Any]) -> None:
        self.rank, self.outcome = rank, None
        self._ended, self._reported = "", False  # how, and whether the others know
        self._result: IO[bytes] = tempfile.TemporaryFile()
        self._dump: IO[bytes] = tempfile.TemporaryFile()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of libraries
            self._pid = os.fork()
        if self._pid == 0:
            self._be(parent, join, fn, args)

    def _be(self, parent: int, join: Callable, fn: Callable, args: Sequence[Any]) -> None:
        status = 1
        try:
            os.setpgid(0, 0)
            die_with(parent)
            faulthandler.register(signal.SIGUSR1, file=self._dump, all_threads=True)
            atexit._clear()  # what the parent has registered is for the parent
            self._result.write(_pickled(_attempt(self.rank, join, fn, args)))
            self._result.flush()
            atexit._run_exitfuncs()  # closes what `fn` has left open, as the end of a program does
            close_left_open()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # never back into the test

    def has_failed(self, may_die: Collection[int], control_fd: int) -> bool:
        """Take the result if there is one; tell whether it is a failure.

        Once it has ended without having joined the others, they hear of it.
        """
        if self.outcome is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._ended = end_of(code)
                self._result.seek(0)
                record = self._result.read()
                end = _Outcome(error=f"died with exit code {code}", when=time.monotonic())
                kept = _Outcome(code) if self.rank in may_die else end
                self.outcome = pickle.loads(record) if record else kept
        if self._ended and not self._reported:
            self._reported = tell_end(control_fd, self.rank, self._pid, self._ended)
        return self.outcome is not None and bool(self.outcome.error)

    def dump(self) -> str:
        """Return what it is doing."""
        os.kill(self._pid, signal.SIGUSR1)
        time.sleep(_DUMP_S)
        self._dump.seek(0)
        return self._dump.read().decode(errors="replace") or "it does not answer"

    def bury(self) -> None:
        """Kill it and what it has started."""
        if self.outcome is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._result.close()
        self._dump.close()


def _pickled(outcome: _Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # whatever its __reduce__ raises
        text = f"returned what cannot be handed to the caller: {type(error).__name__}: {error}"
        return pickle.dumps(_Outcome(error=text, when=time.monotonic()))


def _settings(n: int, timeout: float, config: Config | None) -> Config:
    if not isinstance(n, Integral) or n < 1:
        raise ArgumentError(f"n is {n!r}, expected a number of ranks, at least 1")
    return config or Config(timeout_s=timeout / 2, heap_bytes=_HEAP_BYTES)


@contextlib.contextmanager
def _memory() -> Iterator[tuple[int, int]]:
    fds = make_memfd("control"), make_memfd("heap")
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def _attempt(rank: int, join: Callable, fn: Callable, args: Sequence[Any]) -> _Outcome:
    when = 0.0
    try:
        with join(rank) as comm:
            try:
                return _Outcome(fn(comm, *args))
            except BaseException:
                when = time.monotonic()  # before the peers hear of it
                raise
    except BaseException:
        return _Outcome(error=traceback.format_exc(), when=when or time.monotonic())


def _conclude(outcomes: Sequence[Any], stuck: dict[int, str], timeout: float) -> list[Any]:
    __tracebackhide__ = True
    failed = sorted((o.when, r, o.error.strip()) for r, o in enumerate(outcomes) if o and o.error)
    if not failed and not stuck:
        return [outcome.value for outcome in outcomes]
    texts = [f"rank {rank} failed:\n{error}" for _, rank, error in failed[:1]]
    texts += [f"then rank {rank}: {error.splitlines()[-1]}" for _, rank, error in failed[1:]]
    texts += [f"rank {r} did not end (limit {timeout} s):\n{dump}" for r, dump in stuck.items()]
    raise RankFailed("\n".join(texts))
