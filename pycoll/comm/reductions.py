"""Prefix reductions, and which rank has an extreme value: a part of a communicator."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll.comm.signatures import Op, reducing
from pycoll.runtime.calls.methods import ReduceOptions, reports_misuse
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

if sys.version_info >= (3, 11):
    from typing import Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack


class MoreReductions:
    """The methods of `pycoll.Communicator` for reductions over a part of the ranks, and places."""

    _session: Session

    @reducing(Kind.SCAN)
    def scan(
        self, x: Any, op: Op = "sum", *, out: Any = None, **options: Unpack[ReduceOptions]
    ) -> Any:
        """Combine the arrays of the ranks up to this one: rank r gets x of 0, 1, ..., r combined.

        ``op`` is one of `all_reduce`, but not ``avg``. ``order`` is ``rank`` by default, the serial
        loop, as of ``np.cumsum``.
        """

    @reducing(Kind.EXSCAN)
    def exscan(
        self, x: Any, op: Op = "sum", *, out: Any = None, **options: Unpack[ReduceOptions]
    ) -> Any:
        """Combine the arrays of the ranks below this one: rank r gets those of 0, ..., r - 1.

        Rank 0 gets the neutral element of ``op``: 0 for ``sum``, 1 for ``prod``, the largest value
        for ``min``, the smallest one for ``max``, all bits for ``and``, 0 for ``or`` and ``xor``;
        where ``op`` is a function it gets None, and ``out`` stays as it is. Otherwise as `scan`.
        """

    @reports_misuse
    def minloc(self, x: Any, *, timeout: float | None = None) -> tuple[Any, Any]:
        """Find the smallest value over all ranks, for each element, and who has it.

        Two collectives. A NaN counts as smaller than anything.

        Args:
            x: Array of numbers of any shape, the same on every rank, or a number.
            timeout: See the class.

        Returns:
            The values, and the lowest rank that has each of them, as int64; both of the shape of
            ``x``, and the same on every rank.
        """
        return self._extreme(x, "min", timeout)

    @reports_misuse
    def maxloc(self, x: Any, *, timeout: float | None = None) -> tuple[Any, Any]:
        """Find the largest value over all ranks, for each element, and who has it; see `minloc`.

        A NaN counts as larger than anything.
        """
        return self._extreme(x, "max", timeout)

    def _extreme(self, x: Any, op: str, timeout: float | None) -> tuple[Any, Any]:
        call, n = self._session.call, self._session.world_size
        value = call(Kind.ALL_REDUCE, x, None, op, 0, None, None, timeout)
        best, mine = np.asarray(value), np.asarray(x)
        has_it = (best == mine) | ((best != best) & (mine != mine))
        where = np.where(has_it, np.int64(self._session.rank), np.int64(n))
        rank = call(Kind.ALL_REDUCE, where, None, "min", 0, None, None, timeout)
        return value, (rank[()] if np.ndim(value) == 0 else rank)
