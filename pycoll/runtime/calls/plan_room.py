"""Whether there is memory for compiling a plan: asked before, since the kernel kills."""

from __future__ import annotations

import numpy as np

from pycoll import _C
from pycoll.algorithms import ALGORITHMS
from pycoll.schedule.ir import Schedule

_OPERAND_BYTES = 280  # of tables while a plan is compiled, per operand and rank that it reaches
_FEW_RANKS = 16  # whose plans fit anywhere


class PlanRoom:
    """What compiling plans may take on a host whose ranks do so at the same time."""

    def __init__(self, ranks: int) -> None:
        """Look at what is left; `ranks` share it."""
        self._ranks = ranks
        self._left = 0 if ranks <= _FEW_RANKS else _C.available_memory()

    def check(self, schedule: Schedule, rank: int) -> None:
        """Refuse to compile a plan for which there is no memory.

        Every rank compiles its own; of a program's own algorithm it compiles those of all.

        Raises:
            MemoryError: With the bytes that it takes, and those that are left.
        """
        if self._ranks <= _FEW_RANKS:
            return
        need = compile_bytes(schedule, rank)
        # The others may have taken theirs already, so all ranks are compared with what was left.
        if need * self._ranks > self._left or need > _C.available_memory():
            raise MemoryError(
                f"compiling {schedule} takes some {need} bytes on each of {self._ranks} ranks, and "
                f"{self._left} bytes were available to them when they joined; name an algorithm "
                "that reaches fewer ranks, such as 'halving_doubling', or start fewer ranks"
            )


def compile_bytes(schedule: Schedule, rank: int) -> int:
    """Estimate the memory that compiling takes for a while."""
    operands, reached = 0, np.zeros(schedule.n, bool)
    for folds in schedule.rounds(np.array([rank])):
        for fold in folds:
            if np.any(fold.where):
                operands += len(fold.pieces) * int(np.max(fold.count))
                for piece in fold.pieces:
                    reached[np.asarray(piece.rank) % schedule.n] = True
    near = int(reached.sum()) if schedule.algorithm in ALGORITHMS else schedule.n
    return _OPERAND_BYTES * operands * near
