"""What all tests share: worlds of ranks, and a look at what they leave behind."""

import contextlib
import gc
import os
import signal
from pathlib import Path

import pytest

from pycoll.testing import run_processes, run_threads

FAILED = pytest.StashKey[bool]()


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes many seconds or much memory")
    os.environ["PYCOLL_TUNING"] = "off"  # what was measured on this machine decides nothing here
    os.environ["PYCOLL_SECRET"] = "what only the tests know"  # groups over TCP warn without one
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may start jobs without it


@pytest.fixture(params=["threads", "processes"])
def run(request):
    """``run(n, fn, *args)`` with ranks as threads, and again as processes."""
    return run_threads if request.param == "threads" else run_processes


def children():
    """Return the processes that this one has started and not yet reaped."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def memfds():
    """Count the descriptors of shared memory that this process has."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:pycoll" in target for target in targets)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    """Fail a test that leaves a process or a descriptor of shared memory behind."""
    processes, descriptors = children(), memfds()
    yield
    if request.node.stash.get(FAILED, False):
        return  # its traceback keeps communicators alive
    if memfds() > descriptors:
        gc.collect()  # communicators that are part of a cycle
    assert children() <= processes
    assert memfds() <= descriptors
