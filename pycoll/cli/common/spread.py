"""Work on schedules, spread over processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pycoll.cli.job.rank_main import die_with
from pycoll.errors import ScheduleError

Task = tuple[str, int]  # name for `named_algorithms.lookup`; world size


def spread(work: Callable, tasks: list[Task], jobs: int, verb: str) -> Iterator[Any]:
    """Do the work in some processes, and show how far it is on a terminal.

    Raises:
        ScheduleError: If a process is killed, or ends itself.
    """
    live = sys.stderr.isatty()
    others = set(multiprocessing.active_children())
    forking = multiprocessing.get_context("fork")  # also from Python 3.14 on: nothing stays behind
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), forking, _begin, (os.getpid(),))
    results: list[Future] = []
    try:
        for task in tasks:
            results.append(pool.submit(work, task))
        for i, result in enumerate(as_completed(results), 1):
            found = result.result()
            if live:
                title = "{}, n={}".format(*found[0])
                print(f"\r{i}/{len(tasks)} {verb}  {title:48.48}", end="", file=sys.stderr)
            yield found
    except BrokenProcessPool:
        raise ScheduleError(_at_work(tasks, results, jobs)) from None
    finally:
        done = len(results) == len(tasks) and all(result.done() for result in results)
        if not done:  # Ctrl-C, or a mistake in one of them
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
        pool.shutdown()
        if live:
            print("\r" + " " * 78 + "\r", end="", file=sys.stderr)


def _begin(parent: int) -> None:
    """Leave Ctrl-C to the parent, which ends its workers; they end with it, however it dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)


def _at_work(tasks: list[Task], results: list[Future], jobs: int) -> str:
    """Say what the processes were doing when one of them ended: the first tasks without result."""
    lost = [t for t, r in zip(tasks, results, strict=False) if not r.done() or r.exception()]
    names = "; ".join(f"{name}, n={n}" for name, n in lost[:jobs])
    return (
        f"a process that works on schedules was killed or ended itself; at work were: {names}. "
        "Was memory short? Try fewer --jobs"
    )
