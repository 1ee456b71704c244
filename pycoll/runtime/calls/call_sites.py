"""Where in the user's program a call was made."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType

from pycoll import _C
from pycoll.errors import sendable

_MAX_KNOWN = 4096
_MAKERS = {"init": "pycoll.init() at ", "split": "split() at ", "dup": "dup() at "}
"""Functions of pycoll that a program calls, and that make calls of their own, by name."""
MADE_FOR = tuple(_MAKERS.values())
"""How the place of a call begins that such a function makes."""


class CallSites:
    """Numbers of the places in the program that make calls, for error messages."""

    def __init__(
        self, number: Callable[[str], int], internal: tuple[str, ...] = ("pycoll.",)
    ) -> None:
        """Number places."""
        self._number, self._prefixes = number, internal
        self._places = _C.ProgramPlaces()  # those below, found in a tenth of the time
        self._internal: dict[int, tuple[CodeType, bool]] = {}  # by id; the code is kept alive
        self._numbers: dict[tuple[int, int], tuple[CodeType, int]] = {}
        self._texts: dict[int, str] = {}

    def text(self, number: int) -> str:
        """Return the place that has a number: file, line and function."""
        return self._texts.get(number, "")

    def texts(self) -> dict[int, str]:
        """Return all places that have a number so far."""
        return dict(self._texts)

    def here(self, depth: int = 1) -> int:
        """Return the number of the innermost line that belongs to no internal module.

        The caller knows that all before the frame `depth` are internal; its own has depth 1.
        """
        found: int = self._places.find()
        if found:
            return found
        for before in range(depth):
            self._places.learn(sys._getframe(before).f_code, True)
        return self._look(sys._getframe(depth))

    def _look(self, begin: FrameType) -> int:
        frame, internal = begin, self._internal
        while True:
            code = frame.f_code
            known = internal.get(id(code))
            if known is None:
                inside = f"{frame.f_globals.get('__name__')}.".startswith(self._prefixes)
                known = internal[id(code)] = (code, inside)
            self._places.learn(*known)
            if not known[1]:
                break
            outer = frame.f_back
            if outer is None:
                break
            frame = outer
        key = (id(code), frame.f_lasti)
        found = self._numbers.get(key)
        if found is None:
            if len(self._numbers) >= _MAX_KNOWN:  # code that is made and run again and again
                self._numbers.clear()
                internal.clear()
            where = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}()"
            where = sendable(_maker(begin, frame) + where)
            found = self._numbers[key] = (code, self._number(where))
            self._texts[found[1]] = where
        self._places.number(code, frame.f_lasti, found[1])
        return found[1]

    def of(self, depth: int) -> int | None:
        """Return the number of the line of a frame; None if it is in an internal module.

        The frame of the caller has the `depth` 1.
        """
        number, code = self.here(depth + 1), sys._getframe(depth).f_code
        return None if self._internal.get(id(code), (code, True))[1] else number


def _maker(frame: FrameType | None, end: FrameType) -> str:
    """Return "pycoll.init() at " for a call that pycoll makes for it; the program is at `end`."""
    found = ""
    while frame is not None and frame is not end:
        if f"{frame.f_globals.get('__name__')}.".startswith(("pycoll.start.", "pycoll.comm.")):
            found = _MAKERS.get(frame.f_code.co_name, found)
        frame = frame.f_back
    return found
