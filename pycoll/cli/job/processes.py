"""The processes of one job: started together, watched in one loop, ended together."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pycoll.cli.job.tagging import TaggedStream
from pycoll.cli.job.topology import bound
from pycoll.config import SECRET_VARIABLE, Launch, environment, job_secret
from pycoll.errors import ArgumentError
from pycoll.runtime.startup.bootstrap import make_memfd

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # what they mean is the program's to say
GRACE_S = 2.0  # after the first failure, in which the other ranks can report theirs
KILL_AFTER_S = 3.0  # from SIGTERM to SIGKILL
SIGNAL_GRACE_S = 30.0  # from a signal that was forwarded to SIGKILL: time for a checkpoint
STOPPED_S = 10.0  # in which somebody can continue ranks that are stopped when all others have ended
SWEEP_S = 1.0  # in which processes that the ranks have left behind can end by themselves
TIMEOUT_STATUS = 124
REPORT_AGAIN_S = 0.1  # after a report to the peers that a rank has ended did not get through
LONGEST_SLEEP_S = 86400.0  # the kernel's own limit is 24 days

_RANK_MAIN = str(Path(__file__).with_name("rank_main.py"))


class Job:
    """Ranks 0..world_size - 1 and what became of them.

    Args:
        world_size: Number of ranks.
        timeout_s: When to end the job, in seconds from now; None is never.
        wakeup: Descriptor that delivers the number of each signal to this process, SIGCHLD too.
        keep_going: Whether the others go on when a rank fails, until a signal comes. The job is
            saved if one ends well and none fails because of another.
    """

    first = 0  # number in the whole job of the first rank here
    gives_stdin = True  # rank 0 has the launcher's
    cpus: Sequence[set[int]] = ()  # processors of each rank; none: any

    def __init__(
        self, world_size: int, timeout_s: float | None, wakeup: int, keep_going: bool = False
    ) -> None:
        self._world_size, self._keep_going = world_size, keep_going
        self._timeout_s = timeout_s
        self._expires = None if timeout_s is None else time.monotonic() + timeout_s
        self._ranks: list[subprocess.Popen] = []
        self._running: set[int] = set()
        self._ended: set[int] = set()  # ranks that this object has ended
        self._failed: list[int] = []  # ranks that failed by themselves, in the order seen
        self._over = False  # the time is
        self._timed_out: list[int] = []  # ranks that were running when it was
        self._plan: list[tuple[float, signal.Signals]] = []  # when to send what to those running
        self._continue_by = math.inf  # when to end ranks that are stopped, all others having ended
        self._given_up = False  # they are, by the job
        self._forwarded: set[int] = set()
        self._starting = False
        self._ending = False  # no more ranks are started
        self._streams: list[TaggedStream] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeup, selectors.EVENT_READ)
        self._control, self._heap = make_memfd("control"), make_memfd("heap")
        self._unreported: list[int] = []  # ranks that have ended, maybe before they joined
        # Of groups that the ranks connect over TCP.
        self._secret = job_secret() or secrets.token_hex(32)
        self._report = make_memfd("report")  # lines of JSON, see rank_main.first_cause
        fcntl.fcntl(self._report, fcntl.F_SETFL, os.O_APPEND)

    def start(self, command: list[str], tagged: bool) -> None:
        """Start all ranks.

        A signal, the time limit or a failed rank ends it early; then `watch` ends those started.

        Args:
            command: ``[script, args...]`` or ``["-m", module, args...]``.
            tagged: Whether to pass on their output line by line, with the rank.

        Raises:
            ArgumentError: The system refuses to start so many processes.
        """
        self._starting = True
        try:
            for rank in range(self._world_size):
                self._begin(rank, command, tagged)
                self._handle_events(0.0)
                if self._ending:
                    break
        except OSError as error:
            raise ArgumentError(
                f"cannot start rank {len(self._ranks)} of {self._world_size}: {error}"
            ) from error
        finally:
            self._starting = False
            os.close(self._heap)  # from now on only the ranks hold its memory

    def _begin(self, rank: int, command: list[str], tagged: bool) -> None:
        """Start a rank for the first time."""
        launch = Launch(rank, self._world_size, self._control, self._heap)
        fds = launch.control_fd, launch.heap_fd
        self._spawn(rank, launch.to_env(), fds, command, tagged)

    def _spawn(
        self,
        rank: int,
        place: dict[str, str],
        fds: tuple[int, ...],
        command: list[str],
        tagged: bool,
    ) -> subprocess.Popen:
        """Start a process; `place` are the variables that tell it its place, `fds` it inherits."""
        modes, number = (int(self._keep_going), int(not tagged)), self.first + rank
        numbers = (number, os.getpid(), self._report, *modes)
        variables = {**place, SECRET_VARIABLE: self._secret}
        if tagged:
            variables["PYTHONUNBUFFERED"] = "1"
        stream = subprocess.PIPE if tagged else None
        with bound(self.cpus[rank] if self.cpus else None):
            process = subprocess.Popen(
                [sys.executable, _RANK_MAIN, *map(str, numbers), *command],
                env={**environment(), **variables},
                pass_fds=(*fds, self._report),
                stdin=None if rank == 0 and self.gives_stdin else subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,  # the terminal's Ctrl-C reaches it once, by way of us
            )
        self._ranks[rank : rank + 1] = [process]
        self._running.add(rank)
        if process.stdout is not None and process.stderr is not None:
            self._tag(TaggedStream(number, process.stdout, sys.stdout.buffer))
            self._tag(TaggedStream(number, process.stderr, sys.stderr.buffer))
        return process

    def _tag(self, stream: TaggedStream) -> None:
        self._streams.append(stream)
        self._selector.register(stream, selectors.EVENT_READ, stream)

    def watch(self) -> None:
        """Wait until every rank has ended; end them when one fails or the time is over."""
        while self._running:
            self._handle_events(self._until_next())

    def _handle_events(self, patience_s: float) -> None:
        """Wait for signals and output, and do what is due."""
        for key, _ in self._selector.select(patience_s):
            if key.data is None:
                self._forward(os.read(key.fd, 256))
                self._collect()  # SIGCHLD is among the signals
            elif not key.data.pump():
                self._selector.unregister(key.data)
        for stream in self._streams:
            stream.settle()
        self._report_ends()
        self._send_due()

    def _until_next(self) -> float:
        times = [self._continue_by, *(stream.due for stream in self._streams)]
        times += [self._expires] if self._expires is not None else []
        times += [time.monotonic() + REPORT_AGAIN_S] if self._unreported else []
        times += [when for when, _ in self._plan[:1]]
        return min(max(0.0, min(times, default=math.inf) - time.monotonic()), LONGEST_SLEEP_S)

    def _forward(self, numbers: bytes) -> None:
        for number in numbers:
            if number in PASSED_ON:  # to the ranks alone: what they have started would end
                for rank in self._running:
                    os.kill(self._ranks[rank].pid, number)
            if number not in FORWARDED:
                continue
            if self._keep_going:  # from here on this is what ends the job
                self._keep_going, self._failed = False, []
            self._signal(number)
            if number in self._forwarded:  # asked twice: no longer at the ranks' own pace
                self._end((0.0, signal.SIGKILL))
            elif self._starting:  # the ranks wait for some that will never come
                self._end_after(GRACE_S)
                self._ending = True
            else:
                self._end((SIGNAL_GRACE_S, signal.SIGKILL))
                self._continue_by = min(self._continue_by, time.monotonic() + GRACE_S)
            self._forwarded.add(number)

    def _collect(self) -> None:
        for rank in sorted(self._running):
            status = self._ranks[rank].poll()
            if status is not None:
                self._running.remove(rank)
                if rank not in self._ended:
                    self._unreported.append(rank)
                if status != 0 and rank not in self._ended:
                    self._failed.append(rank)
        if self._failed and not (self._keep_going or self._ended):
            self._end_after(GRACE_S)
        self._look_for_stopped()

    def _look_for_stopped(self) -> None:
        """Give ranks that are stopped, with nobody left who runs, some time to be continued."""
        pids = {rank: self._ranks[rank].pid for rank in sorted(self._running)}
        left = 0 < len(pids) < len(self._ranks) and not self._starting
        if not (left and all(map(_is_stopped, pids.values()))):
            self._continue_by = math.inf
        elif self._continue_by == math.inf and not self._given_up:
            patience_s = GRACE_S if self._forwarded else STOPPED_S
            self._continue_by = time.monotonic() + patience_s
            ranks = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in pids.items())
            say(
                f"only stopped ranks are left: {ranks}; a signal such as SIGSTOP has stopped them. "
                f"Continue with `kill -CONT {' '.join(map(str, pids.values()))}`, or they are "
                f"killed in {patience_s:g} s"
            )

    def _report_ends(self) -> None:
        """Let those who wait for a rank know that it has ended, if it has not joined them."""
        if not self._running or not self._unreported:
            return
        unreported, self._unreported = self._unreported, []
        with contextlib.suppress(ImportError):  # without the engine no rank waits for another
            from pycoll.runtime.startup.make_groups import tell_end

            for rank in unreported:
                process = self._ranks[rank]
                if not tell_end(self._control, rank, process.pid, end_of(process.returncode)):
                    self._unreported.append(rank)

    def _end_after(self, delay_s: float) -> None:
        self._end((delay_s, signal.SIGTERM), (delay_s + KILL_AFTER_S, signal.SIGKILL))

    def _end(self, *signals: tuple[float, signal.Signals]) -> None:
        """Send signals after so many seconds each, unless all is to end earlier anyway."""
        now = time.monotonic()
        if not self._plan or now + signals[-1][0] < self._plan[-1][0]:
            self._plan = [(now + delay_s, number) for delay_s, number in signals]

    def _send_due(self) -> None:
        now = time.monotonic()
        if self._expires is not None and now >= self._expires:
            self._expires = None
            if (self._running or self._missing) and (self._keep_going or not self._failed):
                self._timed_out = sorted(self._running)
                self._over = self._ending = True
                self._end_after(0.0)
        if self._running and now >= self._continue_by:
            self._continue_by, self._given_up = math.inf, True
            self._end((0.0, signal.SIGKILL))
        while self._plan and now >= self._plan[0][0]:
            self._ending = True
            self._ended |= self._running
            self._signal(self._plan.pop(0)[1])

    @property
    def _missing(self) -> int:
        """Number of ranks that have not been started."""
        return self._world_size - len(self._ranks)

    def _signal(self, number: int) -> None:
        for rank in self._running:
            signal_group(self._ranks[rank].pid, number)

    def close(self) -> None:
        """Kill and reap what still runs, and what the ranks have started in their sessions."""
        self._signal(signal.SIGKILL)
        for process in self._ranks:
            process.wait()
        give_up = time.monotonic() + SWEEP_S
        left = [p.pid for p in self._ranks if signal_group(p.pid, 0)]
        while left and time.monotonic() < give_up:
            time.sleep(0.01)
            left = [pid for pid in left if signal_group(pid, 0)]
        for pid in left:
            signal_group(pid, signal.SIGKILL)
        os.close(self._control)
        self._selector.close()
        for stream in self._streams:
            stream.close()

    is_consequence: bool = False  # all that failed here did so because of others; see `conclude`

    def conclude(self) -> int:
        """Say on stderr how the job failed, if it did, and return its exit status."""
        records = _read_all(self._report)
        os.close(self._report)
        started = f"only {len(self._ranks)} of {self._world_size} ranks had been started"
        if self._over:
            ranks = ", ".join(map(str, self._timed_out))
            noun = "rank" if len(self._timed_out) == 1 else "ranks"
            parts = [f"the time of {self._timeout_s:g} s is over"]
            parts += [f"still running: {noun} {ranks}"] if self._timed_out else []
            say("; ".join(parts + [started] * bool(self._missing)))
            return TIMEOUT_STATUS
        if self._missing and self._forwarded:
            name = _name(max(self._forwarded))
            say(f"{started} when {name} came")
            return 128 + max(self._forwarded)
        if not self._failed and self._given_up and not self._forwarded:
            ranks = ", ".join(map(str, sorted(self._ended)))
            say(f"nobody continued the stopped ranks, which were killed: {ranks}")
            return TIMEOUT_STATUS
        if not self._failed:
            return 128 + max(self._forwarded) if self._ended and self._forwarded else 0
        consequences = {r["rank"] - self.first: r["traceback"] for r in records if r["consequence"]}
        causes = [rank for rank in self._failed if rank not in consequences]
        self.is_consequence = not causes
        if not causes:  # nobody has shown a traceback
            sys.stderr.write(consequences[self._failed[0]])
        rank = (causes or self._failed)[0]
        status = self._ranks[rank].returncode
        if self._keep_going and not consequences and any(p.returncode == 0 for p in self._ranks):
            say("; ".join(map(self._outcome, self._failed)) + "; the others went on to their end")
            return 0
        say(self._outcome(rank) + ("; the other ranks were stopped" if self._ended else ""))
        return status if status > 0 else 128 - status

    def _outcome(self, rank: int) -> str:
        return f"rank {self.first + rank} {end_of(self._ranks[rank].returncode)}"


def end_of(status: int) -> str:
    """Return how a process ended, from its status as `subprocess` has it."""
    return f"exited with code {status}" if status >= 0 else f"was killed by {_name(-status)}"


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; one that a debugger holds is not."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return stat.rpartition(")")[2].split()[0] == "T"
    return False


def signal_group(pid: int, number: int) -> bool:
    """Send a signal to the process group of a rank; return whether there is such a group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
        return True
    return False


def _read_all(report: int) -> list[dict]:
    records = []
    for line in os.pread(report, os.fstat(report).st_size, 0).splitlines():
        with contextlib.suppress(ValueError):  # cut short by the death of its writer
            records.append(json.loads(line))
    return records


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def say(text: str) -> None:
    """Write a line of the launcher's own."""
    print(f"pycoll run: {text}", file=sys.stderr, flush=True)
