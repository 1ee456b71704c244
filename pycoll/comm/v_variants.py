"""Collectives whose blocks differ in size: the part of a communicator that is about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll.runtime.calls import v_variants
from pycoll.runtime.calls.methods import reports_misuse
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind


class RaggedCollectives:
    """The methods of `pycoll.Communicator` for blocks of different sizes.

    The first dimension of the arrays may differ between ranks, or is cut into ``counts``; all
    other dimensions and the dtype are the same everywhere.
    """

    _session: Session

    @reports_misuse
    def all_gather_v(self, x: Any, *, out: Any = None, timeout: float | None = None) -> Any:
        """Concatenate arrays whose first dimensions may differ; every rank gets the result."""
        return v_variants.gather(self._session, Kind.ALL_GATHER_V, x, 0, out, timeout)

    @reports_misuse
    def gather_v(
        self, x: Any, root: int = 0, *, out: Any = None, timeout: float | None = None
    ) -> Any:
        """Concatenate arrays whose first dimensions may differ on the root; others get None."""
        return v_variants.gather(self._session, Kind.GATHER_V, x, root, out, timeout)

    @reports_misuse
    def scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        root: int = 0,
        *,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Give rank r the next ``counts[r]`` rows of the root's array; same counts everywhere.

        On other ranks ``x`` only tells dtype and shape of a row: an array of no rows will do.
        """
        return v_variants.scatter(self._session, x, counts, root, out, timeout)

    @reports_misuse
    def reduce_scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        op: str = "sum",
        *,
        out: Any = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Combine all arrays; rank r gets the next ``counts[r]`` rows; same counts everywhere."""
        return v_variants.reduce_scatter(self._session, x, counts, op, order, out, timeout)

    @reports_misuse
    def all_to_all_v(
        self, x: Any, counts: Sequence[int], *, out: Any = None, timeout: float | None = None
    ) -> Any:
        """Send the next ``counts[j]`` rows to rank j; get the rows from each rank, in order."""
        return v_variants.all_to_all(self._session, x, counts, out, timeout)
