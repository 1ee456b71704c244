"""A job on several hosts, ``pycoll run --hosts a,b``: one launcher on each, `host_main`, by ssh."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
import time

from pycoll.cli.job.host_main import CONSEQUENCE
from pycoll.cli.job.processes import (
    FORWARDED,
    GRACE_S,
    KILL_AFTER_S,
    PASSED_ON,
    SIGNAL_GRACE_S,
    TIMEOUT_STATUS,
    say,
)
from pycoll.config import SECRET_VARIABLE, VERSION, environment, job_secret
from pycoll.errors import ArgumentError
from pycoll.observe.hosts import remote_shell

_FIRST_PORT, _PORTS = 30_000, 20_000
_POLL_S = 0.05
_SSH_FAILED, _NOT_FOUND = 255, 127  # exit statuses of ssh, and of a shell
_PASSED_ON = ("PYCOLL_", "OMP_", "PYTHON")  # what variables begin with that ranks get from here


class HostsJob:
    """Ranks 0..n - 1 on several hosts, in blocks, and what became of them.

    Args:
        hosts: Names that the remote shell knows, and the ranks: they meet on the first one.
        n: Number of ranks, at least one for each host.
        rsh: The remote shell and its options.
        timeout_s: When to end the job; None is never.
        wakeup: Descriptor that delivers the number of each signal to this process.
    """

    def __init__(
        self, hosts: list[str], n: int, rsh: str, timeout_s: float | None, wakeup: int
    ) -> None:
        self._hosts, self._rsh, self._wakeup = hosts, remote_shell(rsh), wakeup
        self._timeout_s = timeout_s
        self._bounds = [n * i // len(hosts) for i in range(len(hosts) + 1)]
        self._agents: list[subprocess.Popen[bytes]] = []
        self._failed: list[int] = []  # hosts, in the order in which they failed
        self._hung_up: set[int] = set()  # hosts that have been told to end
        self._forwarded: set[int] = set()
        self._plan: list[tuple[float, str]] = []  # when to hang up, and to kill

    def start(self, command: list[str], tagged: bool) -> None:
        """Start the launchers, and tell them what to do: by stdin, which nobody else can read.

        Raises:
            ArgumentError: If the remote shell cannot be started.
        """
        given = {k: v for k, v in environment().items() if k.startswith(_PASSED_ON)}
        given.pop(SECRET_VARIABLE, None)
        common = {
            "version": VERSION,
            "size": self._bounds[-1],
            "meet": [self._hosts[0], _FIRST_PORT + secrets.randbelow(_PORTS)],
            "secret": job_secret() or secrets.token_hex(32),
            "environment": given,
            "command": command,
            "tagged": tagged,
        }
        path = shlex.quote(environment().get("PYTHONPATH", ""))
        there = (
            f"cd {shlex.quote(os.getcwd())} && exec env PYTHONPATH={path} "
            f"{shlex.quote(sys.executable)} -m pycoll.cli.job.host_main"
        )
        for i, host in enumerate(self._hosts):
            try:
                agent = subprocess.Popen(
                    [*self._rsh, host, there], stdin=subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                raise ArgumentError(
                    f"cannot start {self._rsh[0]!r}: {error.strerror}; --rsh names another one"
                ) from error
            self._agents.append(agent)
            task = {**common, "first": self._bounds[i], "end": self._bounds[i + 1]}
            self._tell(agent, json.dumps(task))

    def _tell(self, agent: subprocess.Popen[bytes], line: str) -> None:
        assert agent.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            agent.stdin.write(line.encode() + b"\n")
            agent.stdin.flush()

    def watch(self) -> None:
        """Wait until all have ended; end them when one fails or the time is over."""
        until = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        running = set(range(len(self._agents)))
        while running:
            if select.select([self._wakeup], [], [], _POLL_S)[0]:
                self._forward(os.read(self._wakeup, 256))
            for i in sorted(running):
                if self._agents[i].poll() is not None:
                    running.remove(i)
                    if self._agents[i].returncode:
                        self._failed.append(i)
                        lost = self._agents[i].returncode in (_SSH_FAILED, _NOT_FOUND)
                        self._end(0.0 if lost else 2 * GRACE_S)
            now = time.monotonic()
            if until is not None and now > until and running:
                until = None
                self._failed.append(-1)
                self._end(0.0)
            while self._plan and now >= self._plan[0][0]:
                what = self._plan.pop(0)[1]
                self._hung_up |= running
                for i in running:
                    self._stop(self._agents[i], what)

    def _forward(self, numbers: bytes) -> None:
        for number in set(numbers) & {*FORWARDED, *PASSED_ON}:
            for agent in self._agents:
                self._tell(agent, str(int(number)))
            if number in PASSED_ON:
                continue
            # A launcher there ends its ranks in that time; one that is not reached cannot.
            self._end(0.0 if number in self._forwarded else SIGNAL_GRACE_S + GRACE_S)
            self._forwarded.add(number)

    def _end(self, delay_s: float) -> None:
        now = time.monotonic() + delay_s
        kill = now + 2 * KILL_AFTER_S + GRACE_S
        if not self._plan or kill < self._plan[-1][0]:
            self._plan = [(now, "hang up"), (kill, "kill")]

    def _stop(self, agent: subprocess.Popen[bytes], what: str) -> None:
        if what == "kill":
            agent.kill()
        elif agent.stdin is not None:
            with contextlib.suppress(OSError):
                agent.stdin.close()

    def close(self) -> None:
        """End what still runs: a launcher ends its ranks when its stdin ends."""
        for agent in self._agents:
            self._stop(agent, "hang up")
        for agent in self._agents:
            try:
                agent.wait(2 * KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()

    def conclude(self) -> int:
        """Say on stderr how the job failed, if it did, and return its exit status."""
        if not self._failed:
            return 0
        if self._failed[0] < 0:
            say(f"the time of {self._timeout_s:g} s is over")
            return TIMEOUT_STATUS
        if self._forwarded:
            return 128 + max(self._forwarded)
        first = self._first_to_fail()
        status, host = self._agents[first].returncode, self._hosts[first]
        if status == _SSH_FAILED:
            line = shlex.join([*self._rsh, host, "true"])
            say(f"{self._rsh[0]} cannot reach {host}, or lost it; try `{line}`")
        elif status == _NOT_FOUND:
            say(f"{sys.executable} is not on {host}: Python and pycoll must lie there as here")
        if status == CONSEQUENCE:
            return 1
        return status if status > 0 else 128 - status

    def _first_to_fail(self) -> int:
        """Return the host where the trouble began: ranks elsewhere may have ended before."""
        ended = {i: self._agents[i].returncode for i in self._failed}
        told = 128 + signal.SIGTERM
        causes = (
            i
            for i, status in ended.items()
            if status != CONSEQUENCE and not (i in self._hung_up and status == told)
        )
        return next(causes, self._failed[0])
