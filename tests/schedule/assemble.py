"""Writing plans by hand, and schedules that are wrong on purpose."""

from __future__ import annotations

import numpy as np

from pycoll.schedule.ir import Schedule, algorithm
from pycoll.schedule.lowering.plan import (
    ALL,
    FOLD_COMPLETE,
    INSTR,
    OPERAND,
    Opcode,
    Plan,
    PlanBuffer,
)

IN, OUT, STAGING = PlanBuffer.IN, PlanBuffer.OUT, PlanBuffer.STAGING


def assemble(schedule, rank, lines, *, slots=0, direct=True, messages=False) -> Plan:
    """Make a plan of lines such as ``("wait", peer, step)`` and ``("fold", sources, targets)``.

    Pieces are (rank, buffer, chunk). The others: ``("signal", step)``, ``("send", peer, piece)``,
    ``("recv", peer, piece)``, ``("complete",)``.
    """
    code, operands = np.zeros(len(lines), INSTR), []
    for instr, (name, *rest) in zip(code, lines, strict=True):
        instr["arg"] = len(operands)
        if name == "fold":
            instr["op"], instr["count"] = Opcode.FOLD, 1
            instr["nsrc"], instr["ndst"] = len(rest[0]), len(rest[1])
            instr["flags"] = FOLD_COMPLETE * (len(rest[0]) == schedule.n)
            operands += [*rest[0], *rest[1]]
        elif name in ("send", "recv"):
            instr["op"], instr["count"] = Opcode[name.upper()], 1
            instr["peer"] = rest[0]
            operands.append(rest[1])
        elif name == "signal":
            instr["op"], instr["arg"] = Opcode.SIGNAL, rest[0]
        else:
            peer, step = rest if rest else (ALL, 0)
            instr["op"], instr["peer"], instr["arg"] = Opcode.WAIT, peer, step
    pieces = np.array([tuple(int(v) for v in piece) for piece in operands], OPERAND)
    return Plan(schedule, rank, code, pieces, slots, direct, messages)


def schedule_of(collective, rounds, n, **options) -> Schedule:
    """Make a schedule of a generator function."""
    return algorithm(collective, "wrong", **options)(rounds).schedule(n)
