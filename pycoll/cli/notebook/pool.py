"""Ranks that stay alive, run what they are given, and send back what they print.

A message is JSON over a Unix socket in a folder of this user's; to a rank:

- ``{"run": text, "name": where}``: run a cell, and answer ``{"done": ...}`` at its end
- ``{"renew": true}``: make a new communicator after a failure, and answer with ``{"renewed": ...}``
- ``{"get": name}``: answer with a variable, packed as objects are between ranks

From a rank comes ``{"out": line}`` while it runs a cell.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from pycoll.errors import ArgumentError, CollError
from pycoll.runtime.calls.parts.encoding import unpack

START_S = 60.0
END_S = 10.0  # for an interrupted cell, and for ranks to end


@dataclass
class Outcome:
    """How a cell ended on a rank."""

    value: str | None = None  # repr of its last expression
    error: str | None = None  # type and message of its exception, and where
    traceback: str = ""
    consequence: bool = False  # the error tells of the failure of another rank


class Pool:
    """The ranks of a notebook.

    Raises:
        CollError: If they cannot be started; says what the launcher printed.
    """

    def __init__(self, n: int) -> None:
        """Start `n` ranks, each with a variable ``comm``."""
        if n < 1:
            raise ArgumentError(f"{n} ranks; at least 1 is needed")
        self.n = n
        self._cells = 0
        self._ranks: list[Connection] = []
        self._pids: list[int] = []
        self._late: list[tuple[int, str]] = []  # what threads printed between cells
        with tempfile.TemporaryDirectory(prefix="pycoll-") as folder:
            path = Path(folder) / "notebook"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(n)
                listener.settimeout(0.1)
                command = ["-m", "pycoll", "run", "-n", str(n), "--tag-output"]
                self._launcher = subprocess.Popen(
                    [sys.executable, *command, "-m", "pycoll.cli.notebook.rank", str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # an interrupt of the notebook is told by `interrupt`
                )
                try:
                    self._greet(listener)
                except BaseException:
                    self.close()
                    raise

    def _greet(self, listener: socket.socket) -> None:
        ranks: dict[int, tuple[Connection, int]] = {}
        deadline = time.monotonic() + START_S
        while len(ranks) < self.n:
            with contextlib.suppress(TimeoutError):
                connection = Connection(listener.accept()[0].detach())
                hello = json.loads(connection.recv_bytes())
                ranks[hello["rank"]] = connection, hello["pid"]
            if self._launcher.poll() is not None:
                assert self._launcher.stdout is not None
                text = self._launcher.stdout.read().decode(errors="replace").strip()
                raise CollError(f"the {self.n} ranks could not be started: {text}")
            if time.monotonic() > deadline:
                raise CollError(f"only {len(ranks)} of {self.n} ranks came within {START_S:.0f} s")
        self._ranks = [ranks[rank][0] for rank in range(self.n)]
        self._pids = [ranks[rank][1] for rank in range(self.n)]

    @property
    def alive(self) -> bool:
        """Whether all ranks are there."""
        return self._launcher.poll() is None and bool(self._ranks)

    def run(self, text: str) -> Iterator[tuple[int, str | Outcome]]:
        """Run a cell on all ranks; yield (rank, line) as they print, and (rank, how it ended).

        What no Python has written, such as a message of a C library, comes as rank -1. If the
        caller is interrupted, so are the ranks, and all ends are yielded before the interrupt.
        """
        self._cells += 1
        self._send({"run": text, "name": f"cell {self._cells}"})
        yield from self._late
        self._late.clear()
        running, deadline, interrupted = set(range(self.n)), float("inf"), None
        while running:
            try:
                ready = self._wait(running, deadline)
            except KeyboardInterrupt as error:
                interrupted, deadline = error, time.monotonic() + END_S
                self.interrupt()
                continue
            if not ready:
                self.close()
                raise CollError(f"ranks {sorted(running)} did not stop and were killed")
            for rank in ready:
                if rank < 0:
                    yield from ((rank, line) for line in self._stray())
                    continue
                told = self._receive(rank)
                if "out" in told:
                    yield rank, told["out"]
                    continue
                running.discard(rank)
                yield rank, Outcome(**told["done"])
        if interrupted is not None:
            raise interrupted

    def renew(self) -> None:
        """Give all ranks a new communicator, after a failure has ended the last one.

        Raises:
            CollError: If that cannot be; the ranks are ended then.
        """
        self._send({"renew": True})
        told = [self._answer(rank, "renewed") for rank in range(self.n)]
        if any(told):
            self.close()
            raise CollError(f"the ranks cannot go on ({next(filter(None, told))}) and are ended")

    def get(self, name: str) -> list[Any]:
        """Return a variable of all ranks, by rank.

        Raises:
            ArgumentError: If a rank has no such variable, or it cannot be sent.
        """
        self._send({"get": name})
        found, failed = [], []
        for rank, connection in enumerate(self._ranks):
            why = self._answer(rank, "got")
            if why is not None:
                failed.append(f"rank {rank}: {why}")
                continue
            found.append(unpack(connection.recv_bytes(), False, f"rank {rank}"))
        if failed:
            raise ArgumentError("; ".join(failed))
        return found

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what the ranks run."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def close(self) -> None:
        """End the ranks; harmless if repeated."""
        for connection in self._ranks:
            connection.close()
        self._ranks = []
        try:
            self._launcher.wait(END_S if self._pids else 0)
        except subprocess.TimeoutExpired:
            self._launcher.kill()  # its ranks die with it
            self._launcher.wait()
        if self._launcher.stdout is not None:
            self._launcher.stdout.close()

    def _send(self, message: dict[str, Any]) -> None:
        for rank, connection in enumerate(self._ranks):
            try:
                connection.send_bytes(json.dumps(message).encode())
            except OSError:
                self._lost(rank)

    def _receive(self, rank: int) -> dict[str, Any]:
        try:
            return json.loads(self._ranks[rank].recv_bytes())
        except (OSError, EOFError):
            return self._lost(rank)

    def _answer(self, rank: int, word: str) -> Any:
        """Return what a rank answers; lines that its threads print meanwhile are kept."""
        told = self._receive(rank)
        while word not in told:
            self._late.append((rank, told["out"]))
            told = self._receive(rank)
        return told[word]

    def _lost(self, rank: int) -> Any:
        try:
            self._launcher.wait(END_S)
        except subprocess.TimeoutExpired:
            self._launcher.kill()  # what it has printed can be read to its end then
        text = " ".join(self._stray())
        self.close()
        raise CollError(f"rank {rank} has ended ({text or 'without a word'}); all ranks are gone")

    def _wait(self, running: set[int], deadline: float) -> list[int]:
        """Return which ranks can be read from, -1 for the launcher; none at the deadline."""
        assert self._launcher.stdout is not None
        sources: dict[Any, int] = {self._ranks[rank]: rank for rank in running}
        sources[self._launcher.stdout] = -1
        left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        ready = [sources[source] for source in wait(list(sources), left)]  # type: ignore[index]
        return [r for r in ready if r >= 0] or ready  # the launcher's end is told by its ranks

    def _stray(self) -> list[str]:
        assert self._launcher.stdout is not None
        data = os.read(self._launcher.stdout.fileno(), 1 << 16)
        return data.decode(errors="replace").splitlines()
