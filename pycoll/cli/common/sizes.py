"""Names, sizes, times and tables, as the command line reads and prints them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from pycoll.algorithms import closest
from pycoll.config import parse_bytes
from pycoll.errors import ArgumentError

_ADDRESSES = 1 << 47  # bytes that a process can address


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """Return the type of an option that is one of some names; of others it tells the closest."""

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"there is no {text!r}{closest(text, list(known))}")
        return text

    return name


def in_memory(text: str) -> int:
    """Read a size of arrays, such as ``8``, ``1K`` or ``64M``.

    Raises:
        ArgumentError: It is none, or no process has room for so much.
    """
    nbytes = parse_bytes(text)
    if nbytes > _ADDRESSES:
        raise ArgumentError(f"{text!r} is more than a process can address, {_ADDRESSES >> 40}T")
    return nbytes


def size(text: str) -> int:
    """Read a size as `in_memory` does, as the type of an option."""
    try:
        return in_memory(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def show_size(nbytes: int) -> str:
    """Write a number of bytes in the largest binary unit that keeps it whole."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


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
