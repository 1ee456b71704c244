"""Where in the user's program a process group was called."""

from __future__ import annotations

_LIBRARIES = ("torch.", "pycoll.", "deepspeed.", "lightning.", "accelerate.")
_WRAPPERS = ("contextlib.", "functools.", "typing_extensions.")


class Placed:
    """Mixed into a session whose calls name the line of the program that called PyTorch.

    Attributes:
        place: Number of that line, for calls that go through `Session`.
    """

    internal = (*_LIBRARIES, *_WRAPPERS)
    place = 0

    def site(self) -> int:
        """Return the number of the caller's line."""
        return self.place
