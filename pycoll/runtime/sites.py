"""Where in the user's program a call was made."""

from __future__ import annotations

import os
import sys


def call_site() -> str:
    """Return file, line and function of the innermost frame outside of pycoll."""
    frame = sys._getframe(1)
    while frame.f_back and f"{frame.f_globals.get('__name__', '')}.".startswith("pycoll."):
        frame = frame.f_back
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}()"
