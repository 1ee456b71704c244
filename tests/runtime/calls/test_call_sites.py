"""Errors name the innermost line outside of pycoll, whatever modules of others are called."""

from pycoll.runtime.calls.call_sites import CallSites
from pycoll.runtime.sessions.reports import made_at

CALL = "def call(ask):\n    return ask()\n"


def made_in(module):
    """Return what is told of a call by a module of this name."""
    names, told = {"__name__": module}, []
    sites = CallSites(lambda where: told.append(where) or 7)
    exec(compile(CALL, f"/somewhere/{module}.py", "exec"), names)
    assert [names["call"](sites.here) for _ in range(3)] == [7] * 3
    assert told == [sites.text(7)]  # asked for once
    return told[0]


def test_modules_of_pycoll_are_left_out():
    assert made_in("pycoll").startswith("test_call_sites.py:")
    assert made_in("pycoll.parallel.nn").startswith("test_call_sites.py:")


def test_modules_with_names_like_pycolls_are_not():
    assert made_in("pycoll_app") == "pycoll_app.py:2 call()"
    assert made_in("pycollect.main") == "pycollect.main.py:2 call()"


def test_the_name_of_a_file_is_no_call():
    """Only what pycoll calls for `init` or `split` stands in the place of a call."""
    assert made_at("barrier()", "look at me.py:3 f()") == "barrier() at look at me.py:3 f()"
    assert made_at("barrier()", "split() at a.py:3 f()") == "split() at a.py:3 f()"
    assert made_at("barrier()", "") == "barrier()"
