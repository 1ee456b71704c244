"""Errors name the innermost line outside of pycoll, whatever modules of others are called."""

from pycoll.runtime.sites import call_site

CALL = "def call(ask):\n    return ask()\n"


def made_in(module):
    """Return what `call_site` tells of a call by a module of this name."""
    names = {"__name__": module, "call_site": call_site}
    exec(compile(CALL, f"/somewhere/{module}.py", "exec"), names)
    return names["call"](call_site)


def test_modules_of_pycoll_are_left_out():
    assert made_in("pycoll").startswith("test_sites.py:")
    assert made_in("pycoll.parallel.nn").startswith("test_sites.py:")


def test_modules_with_names_like_pycolls_are_not():
    assert made_in("pycoll_app") == "pycoll_app.py:2 call()"
    assert made_in("pycollect.main") == "pycollect.main.py:2 call()"
