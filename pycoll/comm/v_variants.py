"""Collectives whose blocks differ in size: the part of a communicator that is about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from pycoll.runtime.calls.methods import reports_misuse
from pycoll.runtime.calls.parts import v_variants
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

Counts = Sequence[int] | np.ndarray[Any, np.dtype[Any]]
_A = TypeVar("_A")


class RaggedCollectives:
    """The methods of `pycoll.Communicator` for blocks of different sizes.

    The first dimension of the arrays may differ between ranks, or is cut into ``counts``; all
    other dimensions and the dtype are the same everywhere. ``op`` and ``order`` are those of
    `Communicator.all_reduce`.
    """

    _session: Session

    @reports_misuse
    def all_gather_v(self, x: _A, *, out: _A | None = None, timeout: float | None = None) -> _A:
        """Concatenate arrays whose first dimensions may differ; every rank gets the result."""
        result: _A = v_variants.gather(self._session, Kind.ALL_GATHER_V, x, 0, out, timeout)
        return result

    @reports_misuse
    def gather_v(
        self, x: Any, root: int = 0, *, out: Any = None, timeout: float | None = None
    ) -> Any:
        """Concatenate arrays whose first dimensions may differ on the root; others get None."""
        return v_variants.gather(self._session, Kind.GATHER_V, x, root, out, timeout)

    @reports_misuse
    def scatter_v(
        self,
        x: _A,
        counts: Counts,
        root: int = 0,
        *,
        out: _A | None = None,
        timeout: float | None = None,
    ) -> _A:
        """Give rank r the next ``counts[r]`` rows of the root's array; same counts everywhere.

        On other ranks ``x`` only tells dtype and shape of a row: an array of no rows will do.
        """
        result: _A = v_variants.scatter(self._session, x, counts, root, out, timeout)
        return result

    @reports_misuse
    def reduce_scatter_v(
        self,
        x: _A,
        counts: Counts,
        op: str = "sum",
        *,
        out: _A | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> _A:
        """Combine all arrays; rank r gets the next ``counts[r]`` rows; same counts everywhere."""
        result: _A = v_variants.reduce_scatter(self._session, x, counts, op, order, out, timeout)
        return result

    @reports_misuse
    def all_to_all_v(
        self, x: _A, counts: Counts, *, out: _A | None = None, timeout: float | None = None
    ) -> _A:
        """Send the next ``counts[j]`` rows to rank j; get the rows from each rank, in order."""
        result: _A = v_variants.all_to_all(self._session, x, counts, out, timeout)
        return result
