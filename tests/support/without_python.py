"""Calls that must reach the engine without Python code."""

import contextlib


@contextlib.contextmanager
def without_python(comm):
    """Within it, a call that has to be prepared raises."""

    def refuse(*_):
        raise AssertionError("this call was prepared by Python code")

    session = comm._session
    session.prepare = refuse
    try:
        yield
    finally:
        del session.prepare
