"""What tests of failures share: ways of waiting, and how soon an error has to come."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pycoll
from cases import shared_float

BOUND_S = 1.0
X = np.ones(100)
KILLED = -signal.SIGKILL


def begun(work):
    """Give the background the time to begin a call, so that waiting for it cannot run it."""
    time.sleep(0.02)
    return work


# Ways of waiting for the others.
WAITS = {
    "all_reduce": lambda comm: comm.all_reduce(X),
    "large all_reduce": lambda comm: comm.all_reduce(np.ones(300_000)),
    "ring": lambda comm: comm.all_reduce(X, algorithm="ring", order="any"),
    "barrier": lambda comm: comm.barrier(),
    "broadcast": lambda comm: comm.broadcast(X, root=1),
    "gather": lambda comm: comm.gather(X),
    "in the background": lambda comm: comm.all_reduce(X, async_op=True).wait(),
    "begun in the background": lambda comm: begun(comm.all_reduce(X, async_op=True)).wait(),
    "v-variant": lambda comm: comm.all_gather_v(X),
    "recv": lambda comm: comm.recv(np.empty(3), 1),
    "split": lambda comm: comm.split(0),
}


class Event:
    """When something happened on one rank, in memory that all ranks see."""

    def __init__(self):
        self._time = shared_float()

    def happens(self):
        self._time[0] = time.monotonic()

    def wait(self):
        while self._time[0] == 0:
            time.sleep(0.001)

    def age(self):
        return time.monotonic() - self._time[0]


def expect(comm, error, wait, event, match=None):
    """Wait until the error comes; return its text. A later call must raise it too."""
    with pytest.raises(error, match=match) as caught:
        wait(comm)
    assert event.age() < BOUND_S
    with pytest.raises(error):
        comm.barrier()
    return type(caught.value).__name__, str(caught.value)


@contextlib.contextmanager
def interrupted(event, name):
    """Within it, Ctrl-C comes when a function of this name is entered ("call") or left ("return").

    Or when one in C, which it has called, comes back to it ("c_return").
    """

    def profile(frame, what, _):
        if what == event and frame.f_code.co_name == name:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


class InterruptAt:
    """Runs functions in which Ctrl-C comes at one point of pycoll's code in Python.

    A point is where a function is entered or left, or one in C comes back, for the first time:
    there Python looks for signals.
    """

    _ROOT = Path(pycoll.__file__).parent
    _FILES = (
        *map(str, _ROOT.glob("*.py")),
        str(_ROOT / "comm"),
        str(_ROOT / "runtime"),
        contextlib.__file__,
    )

    def __init__(self, number):
        """Choose the point, the first one being 0; or none, by None."""
        self._number, self._seen = number, set()
        self._profiler = None if number is None else self._profile  # Python 3.11 may drop its own
        self.where = None  # it has come there

    def run(self, function, *args):
        """Run a function; return what it returns, or None if it was interrupted."""
        sys.setprofile(self._profiler)
        try:
            return function(*args)
        except KeyboardInterrupt:
            return None
        finally:
            sys.setprofile(None)

    def _profile(self, frame, what, function):
        code = frame.f_code
        if what == "c_call" or not code.co_filename.startswith(self._FILES):
            return
        name = getattr(function, "__name__", "") if what == "c_return" else ""
        point = f"{code.co_filename}:{frame.f_lineno} {code.co_name} {what} {name}"
        if point in self._seen:
            return
        self._seen.add(point)
        if len(self._seen) > self._number:
            sys.setprofile(None)
            self.where = point
            raise KeyboardInterrupt


def in_child(function):
    """Return the exit code of a forked child that runs a function."""
    child = os.fork()
    if child == 0:
        os._exit(function() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def mode_at(address):
    """Return how a page is mapped, as /proc/self/maps has it."""
    with open("/proc/self/maps") as file:
        for line in file:
            span, mode = line.split()[:2]
            first, end = (int(word, 16) for word in span.split("-"))
            if first <= address < end:
                return mode
    return None


def state_of(pid):
    """Return the letter that /proc has for the state of a process: "T" if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def who(comm, old):
    """Return the former ranks of all, gathered in several ways that have to agree."""
    mine = np.array([old])
    everybody = comm.all_gather(mine)
    total = comm.all_reduce(np.full(100_000, float(old)))
    assert (total == everybody.sum()).all()
    assert everybody[comm.rank] == old
    assert comm.world_size == len(everybody)
    return everybody.tolist()
