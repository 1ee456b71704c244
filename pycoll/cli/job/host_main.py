"""The launcher of one host's ranks in a job of ``pycoll run --hosts``.

Its first line of input says what to do, each further line is the number of a signal to pass on. The
end of its input is the end of the job: whoever has started it is gone.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
from typing import Any

from pycoll.cli.job.processes import Job, say
from pycoll.cli.job.wakeup import woken_by_signals
from pycoll.config import SECRET_VARIABLE, VERSION, Config, environment
from pycoll.errors import CollError
from pycoll.runtime.startup.room import check_job

_STDIN = 0
_REFUSED = 2
CONSEQUENCE = 113  # status of a host on which ranks failed only because of those of others


class HostJob(Job):
    """The ranks of one host, which meet those of the others where the environment says.

    Args:
        task: What the launcher of all has written.
        wakeup: See `Job`.
    """

    gives_stdin = False

    def __init__(self, task: dict[str, Any], wakeup: int) -> None:
        super().__init__(task["end"] - task["first"], None, wakeup)
        self.first: int = task["first"]
        self._task = task
        self._selector.register(_STDIN, selectors.EVENT_READ, self)

    def _begin(self, rank: int, command: list[str], tagged: bool) -> None:
        host, port = self._task["meet"]
        place = {
            "RANK": self.first + rank,
            "WORLD_SIZE": self._task["size"],
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": self._world_size,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        }
        self._spawn(rank, {k: str(v) for k, v in place.items()}, (), command, tagged)

    def _report_ends(self) -> None:
        """Do nothing: ranks that are on their way meet elsewhere, and hear of it there."""

    def fileno(self) -> int:
        """Return the descriptor of the input."""
        return _STDIN

    def pump(self) -> bool:
        """Read signals; at the end of the input, end the ranks."""
        data = os.read(_STDIN, 256)
        if data:
            self._forward(bytes(int(word) for word in data.split()))
        else:
            self._forwarded.add(signal.SIGTERM)  # what they get, and the status
            self._end_after(0.0)
        return bool(data)


def main() -> int:
    """Run the ranks of this host, and return their exit status."""
    line = b""
    while not line.endswith(b"\n"):  # unbuffered: what follows is for the loop
        byte = os.read(_STDIN, 1)
        if not byte:
            return _REFUSED
        line += byte
    task = json.loads(line)
    if task["version"] != VERSION:
        say(f"{os.uname().nodename} has pycoll {VERSION}, the launcher {task['version']}")
        return _REFUSED
    environment().update({**task["environment"], SECRET_VARIABLE: task["secret"]})
    try:
        check_job(task["end"] - task["first"], Config.from_env())
    except CollError as error:
        say(f"{os.uname().nodename}: {error}")
        return _REFUSED
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with woken_by_signals() as wakeup:
        job = HostJob(task, wakeup)
        try:
            job.start(task["command"], task["tagged"])
            job.watch()
        finally:
            job.close()
    status = job.conclude()
    return CONSEQUENCE if job.is_consequence else status


if __name__ == "__main__":
    sys.exit(main())
