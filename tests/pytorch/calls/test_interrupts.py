"""Interrupts between any two lines of a wait: no later call hangs, and no peer is left behind."""

import signal
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch.distributed as dist  # noqa: E402

import pycoll.torch.calls.background  # noqa: E402
import pycoll.torch.calls.work  # noqa: E402
from pycoll.torch.calls.background import Background  # noqa: E402
from worlds_torch import run_group  # noqa: E402

LIMIT_S = 5
FILES = (pycoll.torch.calls.background.__file__, pycoll.torch.calls.work.__file__)


class Stop(KeyboardInterrupt):
    """What the tests interrupt with."""


def stop(*_):
    raise Stop


def interrupting(number):
    """Return a trace function that raises before the n-th line of the background; and if it did.

    A line counts once in a call of its function: Python comes back to that of a `with` at its end,
    but looks for no signals there.
    """
    lines = [0]

    def tracer(frame, event, arg):
        seen = set()

        def local(frame, event, arg):
            if event == "line" and frame.f_lineno not in seen:
                seen.add(frame.f_lineno)
                lines[0] += 1
                if lines[0] == number:
                    raise Stop
            return local

        return local if frame.f_code.co_filename in FILES else None

    return tracer, lambda: lines[0] >= number


def ends(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return not thread.is_alive()


def outcome(work):
    try:
        return work.wait()
    except Stop as error:
        return error


def interrupted_call(number):
    """Interrupt a call, its future and its wait before the n-th line; tell what hangs then."""
    background, ran, futures, works = Background("test"), [], [], []
    background._start = lambda: None  # whoever waits runs the call
    tracer, did = interrupting(number)
    sys.settrace(tracer)
    try:
        works.append(background.submit(lambda: ran.append(1), []))
        futures.append(works[0].get_future())
        works[0].wait()
    except Stop:
        pass
    finally:
        sys.settrace(None)
    hangs = []
    if not ends(lambda: background.submit(lambda: None, []).wait()):
        hangs.append("a later call")
    if works and not ends(lambda: outcome(works[0])):
        hangs.append("its own wait")
    if futures and not futures[0].done():
        hangs.append("its future")
    if background.busy or len(ran) > 1:
        hangs.append(f"busy, or run {len(ran)} times")
    return hangs, did()


@pytest.mark.timeout(120)
def test_an_interrupt_before_each_line():
    number, went_on, hangs = 1, True, {}
    while went_on:
        found, went_on = interrupted_call(number)
        if found:
            hangs[number] = found
        number += 1
    assert number > 60, "the lines were not traced"
    assert not hangs


@pytest.mark.timeout(60)
def test_many_interrupts_of_a_real_timer():
    background = Background("test")
    before = signal.signal(signal.SIGALRM, stop)
    end, count = time.monotonic() + 3, 0
    try:
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + (count * 7919 % 300) * 1e-6)
                for _ in range(100_000):  # Python drops what is raised in a destructor
                    background.submit(lambda: None, []).wait()
            except Stop:
                count += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert count > 100
    assert ends(lambda: background.submit(lambda: None, []).wait())
    assert not background.busy


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_interrupt_before_the_engine_ends_the_group(asynchronous):
    """The peers would take the next call of that rank for their part of this one."""

    def body(rank, n):
        group, x = dist.group.WORLD, torch.ones(3)
        group._caller.background._start = lambda: None
        if rank == 0:
            group._caller.calls.run = stop
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(x, async_op=True).wait() if asynchronous else dist.all_reduce(x)
            del group._caller.calls.run
        with pytest.raises(dist.DistBackendError, match=r"rank 0 was interrupted \(Stop\)"):
            dist.all_reduce(x)

    run_group(2, body)
