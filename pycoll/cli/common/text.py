"""Sizes, times and tables as text."""

from __future__ import annotations

import math
from collections.abc import Sequence


def show_size(nbytes: int) -> str:
    """Write a number of bytes in the largest binary unit that keeps it whole."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def sized(nbytes: int) -> str:
    """Return a size as ``8``, ``64K`` or ``1M``, in full where it is no round number."""
    for shift, suffix in ((30, "G"), (20, "M"), (10, "K")):
        if nbytes >> shift and not nbytes % (1 << shift):
            return f"{nbytes >> shift}{suffix}"
    return str(nbytes)


def show_time(seconds: float) -> str:
    """Write a time with three significant digits."""
    if not math.isfinite(seconds):
        return "-"
    units = ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (math.inf, 1.0, "s"))
    _, factor, unit = next(entry for entry in units if seconds < entry[0])
    value = seconds * factor
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{digits}f} {unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Lay rows out in columns; ``right`` numbers the columns that are aligned to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
