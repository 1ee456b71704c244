"""A plan: one rank's program, as the engine reads it.

The layout of the two record types is that of ``csrc/engine/plan.h``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pycoll.schedule.ir import Schedule


class Opcode(IntEnum):
    """The kinds of instruction."""

    FOLD = 0
    SIGNAL = 1
    WAIT = 2
    SEND = 3
    RECV = 4


class PlanBuffer(IntEnum):
    """Memory that an operand can name; STAGING has scratch memory, too, in slots."""

    IN = 0
    OUT = 1
    STAGING = 2


FOLD_TREE = 1
FOLD_COMPLETE = 2

ENTERED = 1
DONE = 0xFFFE
FAILED = 0xFFFF
ALL = 0xFFFF  # peer of a WAIT of a message plan: everything under way

INSTR = np.dtype(
    [
        ("op", "u1"),
        ("flags", "u1"),
        ("nsrc", "u2"),
        ("ndst", "u2"),
        ("peer", "u2"),
        ("arg", "u4"),
        ("count", "u4"),
        ("round", "u4"),
    ]
)
OPERAND = np.dtype([("rank", "u2"), ("buffer", "u2"), ("chunk", "u4")])


def step_of(line: int) -> int:
    """Step that a rank publishes after a line; the entry is line -1."""
    return line + 2


@dataclass(frozen=True)
class Plan:
    """One rank's program."""

    schedule: Schedule  # what it was made from
    rank: int  # whose program it is
    code: np.ndarray  # ``[instructions]`` records of dtype `INSTR`
    operands: np.ndarray  # ``[operands]`` records of dtype `OPERAND`; sources before destinations
    slots: int  # slots it uses in every rank's staging buffer
    direct: bool  # peers read and write the users' arrays in place
    messages: bool = False  # it sends and receives; otherwise it signals and waits

    @property
    def rounds(self) -> int:
        """Number of rounds in which this rank does something."""
        return int(self.code["round"].max()) + 1 if len(self.code) else 0

    @property
    def scales_in_fold(self) -> bool:
        """Whether every fold that reduces sees the contributions of all ranks, on every rank.

        Asked of the whole schedule: a rank may hold what another rank's partial folds have made.
        """
        return self.schedule.reduces_at_once

    def listing(self) -> str:
        """Return the program as text, one instruction a line."""
        return "\n".join(self._line(i) for i in range(len(self.code)))

    def _line(self, i: int) -> str:
        code = self.code[i]
        op = Opcode(code["op"])
        if op == Opcode.FOLD:
            first, nsrc, ndst = int(code["arg"]), int(code["nsrc"]), int(code["ndst"])
            srcs = " + ".join(self._operand(k) for k in range(first, first + nsrc))
            dsts = ", ".join(self._operand(k) for k in range(first + nsrc, first + nsrc + ndst))
            shape = " (tree)" if code["flags"] & FOLD_TREE else ""
            return f"{i:4d}  fold x{code['count']}: {srcs} -> {dsts}{shape}"
        if op in (Opcode.SEND, Opcode.RECV):
            way = "to" if op == Opcode.SEND else "from"
            piece = self._operand(int(code["arg"]))
            return f"{i:4d}  {op.name.lower()} x{code['count']} {piece} {way} rank {code['peer']}"
        peer = f" rank {code['peer']}" if op == Opcode.WAIT else ""
        step = "done" if code["arg"] == DONE else f"step {code['arg']}"
        return f"{i:4d}  {op.name.lower()}{peer} {step}"

    def _operand(self, k: int) -> str:
        rank, buffer, chunk = self.operands[k]
        return f"{PlanBuffer(buffer).name.lower()}[{rank}:{chunk}]"
