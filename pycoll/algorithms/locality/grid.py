"""Worlds as grids of ranks, the last axis varying fastest, as on a torus."""

from __future__ import annotations

from pycoll.errors import ScheduleError


def grid(n: int, axes: int) -> list[int]:
    """Return lengths of so many axes, as alike as the divisors of n allow; some may be 1.

    Raises:
        ScheduleError: If there are to be no axes.
    """
    if axes < 1:
        raise ScheduleError(f"a grid has {axes} axes, expected 1 or more")
    lengths = []
    for left in range(axes, 0, -1):
        lengths.append(max(d for d in range(1, n + 1) if n % d == 0 and d**left <= n))
        n //= lengths[-1]
    return lengths
