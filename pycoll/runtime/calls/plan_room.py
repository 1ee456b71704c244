"""Whether there is memory for compiling a plan: asked before, since the kernel kills."""

from __future__ import annotations

import numpy as np

from pycoll import _C
from pycoll.algorithms import ALGORITHMS
from pycoll.schedule.ir import Schedule

# While a plan is compiled: for each of this rank's operands, and for each rank. Measured, over all
# algorithms; tests/runtime/calls/test_plan_room.py does it again.
_OPERAND_BYTES, _RANK_BYTES = 1 << 10, 2 << 10
# Of algorithms whose folds reach every rank's memory from every rank: for each pair of ranks, too.
_PAIR_BYTES = {("broadcast", "push_pull"): 304} | {
    (prefix, name): 64 for prefix in ("scan", "exscan") for name in ("direct", "direct_rank")
}
_PROVEN_BYTES = 280  # of a program's own algorithm: for each operand of every rank
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
                "whose ranks have less to do, such as 'recursive_doubling', or start fewer ranks"
            )


def compile_bytes(schedule: Schedule, rank: int) -> int:
    """Estimate the memory that compiling takes for a while."""
    operands, n = 0, schedule.n
    for folds in schedule.rounds(np.array([rank])):
        for fold in folds:
            if np.any(fold.where):
                operands += len(fold.pieces) * int(np.max(fold.count))
    if schedule.algorithm not in ALGORITHMS:
        return _PROVEN_BYTES * operands * n
    key = schedule.algorithm.collective, schedule.algorithm.name
    return _OPERAND_BYTES * operands + _RANK_BYTES * n + _PAIR_BYTES.get(key, 0) * n * n
