"""What all ranks of a call must agree on, in 64 bits."""

from __future__ import annotations

import zlib
from typing import Any

from pycoll.algorithms import ALGORITHMS
from pycoll.schedule.ir import Algorithm

FLAG_DIRECT = 4
FLAG_READ = 8  # ranks may read each other's private arrays; with FLAG_DIRECT: this call does
FLAG_INPUT = 16  # with FLAG_DIRECT: only inputs are reached
CUSTOM = 0x200  # from here on numbers stand for algorithms outside the registry
TWO_LEVELS = 0x3FE  # for a call in two levels: see pycoll.runtime.sessions.two_level_plans


def descriptor(kind: int, dtype: int, op: int, flags: int, root: int, algorithm: int) -> int:
    """Pack what all ranks of a call must agree on into 64 bits; see docs/architecture.md.

    The flags are an order, and some of `FLAG_DIRECT`, `FLAG_READ` and `FLAG_INPUT`. Of the
    algorithm's number the lowest 16 bits count.
    """
    return kind | dtype << 8 | op << 16 | flags << 24 | root << 32 | (algorithm & 0xFFFF) << 48


def algorithm_number(algorithm: Algorithm, params: dict[str, Any], code: int | None = None) -> int:
    """Return a number for an algorithm with parameters: 16 bits, and 32 of a checksum above them.

    Args:
        algorithm: The algorithm. If it is in the registry, 10 bits are its index.
        params: Its parameters; the other 6 bits are of a checksum of these.
        code: For an algorithm outside the registry a 32-bit checksum of its plans, of which 15 bits
            are in the 16; by default one of its name and parameters.
    """
    text = f"{algorithm.name}{sorted((k, v) for k, v in params.items() if k != 'root')}"
    check = zlib.crc32(text.encode())
    if algorithm in ALGORITHMS:
        return ALGORITHMS.index(algorithm) | (check & 0x3F) << 10 | check << 16
    check = check if code is None else code
    short = CUSTOM + (check & 0x3FFFFFF) % (TWO_LEVELS - CUSTOM) | (check >> 26) << 10
    return short | check << 16
