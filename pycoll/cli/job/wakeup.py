"""Signals as bytes that a launcher can wait for."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from pycoll.cli.job.processes import FORWARDED, PASSED_ON


@contextlib.contextmanager
def woken_by_signals() -> Iterator[int]:
    """Yield a descriptor from which the numbers of arriving signals can be read."""
    read_end, write_end = os.pipe()
    for fd in (read_end, write_end):
        os.set_blocking(fd, False)
    known = (*FORWARDED, *PASSED_ON)
    wanted = [s for s in known if signal.getsignal(s) != signal.SIG_IGN]  # as nohup sets it
    before = {s: signal.signal(s, lambda *_: None) for s in (*wanted, signal.SIGCHLD)}
    old_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(old_wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)
