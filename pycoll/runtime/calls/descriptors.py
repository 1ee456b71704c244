"""What all ranks of a call must agree on, in 64 bits, and what those say."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from pycoll.algorithms import ALGORITHMS
from pycoll.schedule.ir import Algorithm
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.types import Kind, Order, ReduceOp, type_name

FLAG_DIRECT = 4
FLAG_READ = 8  # ranks may read each other's private arrays; with FLAG_DIRECT: this call does
FLAG_INPUT = 16  # with FLAG_DIRECT: only inputs are reached
CUSTOM = 0x200  # from here on numbers stand for algorithms outside the registry
TWO_LEVELS = 0x3FE  # for a call in two levels: see pycoll.runtime.sessions.two_level_plans

_MEMORY = {
    0: "private",
    FLAG_READ: "private (single copy allowed)",
    FLAG_DIRECT | FLAG_READ: "private (single copy)",
    FLAG_DIRECT: "symmetric",
    FLAG_DIRECT | FLAG_INPUT: "symmetric (input only)",
}
_OTHER = {TWO_LEVELS: "two_levels"}
_REDUCING = (
    *(Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE_SCATTER_V),
    *(Kind.SCAN, Kind.EXSCAN),
)
_GATHERING = ("gather", "all_gather")  # whose count is that of the result
FIELDS = ("kind", "dtype", "op", "root", "count", "order", "memory", "algorithm")
FUNCTION = "a function"  # an operation that the engine does not know: it moves the arrays


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


@dataclass(frozen=True)
class Call:
    """What a rank called, unpacked from its descriptor."""

    kind: str
    dtype: str
    op: str
    order: str
    root: int
    memory: str
    algorithm: str
    count: int

    @classmethod
    def unpack(cls, word: int, count: int) -> Call:
        """Read a descriptor word; see `descriptor`."""
        kind, dtype, op, flags = (word >> shift & 0xFF for shift in (0, 8, 16, 24))
        if kind not in _REDUCING:
            dtype |= op << 8  # see `pycoll.types.type_code`
        number = word >> 48 & 0xFFFF
        index = number & 0x3FF
        known = index < len(ALGORITHMS)
        reduces = kind in _REDUCING
        moves = known and not COLLECTIVES[ALGORITHMS[index].collective].reduces
        return cls(
            kind=_name(Kind, kind),
            dtype=type_name(dtype),
            op=(FUNCTION if moves else _name(ReduceOp, op)) if reduces else "",
            order=_name(Order, flags & 3) if reduces and not moves else "",
            root=word >> 32 & 0xFFFF,
            memory=_MEMORY[flags & (FLAG_DIRECT | FLAG_READ | FLAG_INPUT)],
            algorithm=f"{ALGORITHMS[index].name if known else _OTHER.get(index, 'custom')}"
            f"#{number >> 10 if known or index in _OTHER else number:x}",
            count=count,
        )

    def __str__(self) -> str:
        parts = [
            p for p in (self.op and f"op={self.op}", self.order and f"order={self.order}") if p
        ]
        into = "into " if self.kind in _GATHERING else ""
        text = ", ".join([f"{into}{self.dtype}[{self.count}]", *parts, f"root={self.root}"])
        return f"{self.kind}({text}, {self.memory} memory, algorithm={self.algorithm})"


def _name(enum: Any, value: int) -> str:
    try:
        return enum(value).name.lower()
    except ValueError:
        return f"{enum.__name__.lower()}#{value}"
