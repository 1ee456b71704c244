"""An exception of a signal handler that comes while a plan is compiled is not lost."""

import sys

import pytest

from pycoll.algorithms import ALGORITHMS
from pycoll.schedule.lowering.compile import peer_plan
from pycoll.schedule.lowering.messages import message_plan

COMPILERS = {
    "staged": lambda schedule: peer_plan(schedule, 1, direct=False),
    "direct": lambda schedule: peer_plan(schedule, 1, direct=True),
    "messages": lambda schedule: message_plan(schedule, 1),
}


class Interrupted(BaseException):
    pass


def interrupted_after(calls, work):
    """Do some work with an exception when Python code has been called so often.

    Returns:
        How many calls there were, at most `calls`, and whether the exception came out.
    """
    seen = 0

    def trace(frame, event, arg):
        nonlocal seen
        seen += 1
        if seen == calls:
            raise Interrupted

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Interrupted:
        return seen, True
    finally:
        sys.settrace(before)
    return seen, False


@pytest.mark.parametrize("mode", COMPILERS)
@pytest.mark.parametrize("name", ["ring", "one_shot"])
def test_no_interrupt_is_lost(mode, name):
    schedule = next(a for a in ALGORITHMS if a.name == name).schedule(3)

    def work():
        COMPILERS[mode](schedule)

    work()  # what is made once is there from now on
    total, _ = interrupted_after(0, work)
    assert total > 50
    lost = [k for k in range(1, total + 1) if interrupted_after(k, work) != (k, True)]
    assert not lost
