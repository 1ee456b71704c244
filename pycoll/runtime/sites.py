"""Where in the user's program a call was made."""

from __future__ import annotations

import os
import sys

from pycoll.errors import sendable


def call_site() -> str:
    """Return file, line and function of the innermost frame outside of pycoll."""
    frame = sys._getframe(1)
    while frame.f_back and _is_ours(frame.f_globals.get("__name__")):
        frame = frame.f_back
    code = frame.f_code
    return sendable(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}()")


def _is_ours(module: object) -> bool:
    """Whether this is the name of a module of pycoll; programs may have any name, or none."""
    return isinstance(module, str) and f"{module}.".startswith("pycoll.")
