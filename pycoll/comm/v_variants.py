"""Collectives whose blocks differ in size: the part of a communicator that is about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np

from pycoll.runtime.calls.methods import reports_misuse, v_variant
from pycoll.runtime.calls.parts import v_variants
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

Counts = Sequence[int] | np.ndarray[Any, np.dtype[Any]]
_Rows = np.ndarray[tuple[int], np.dtype[np.int64]]
_A = TypeVar("_A")


class RaggedCollectives:
    """The methods of `pycoll.Communicator` for blocks of different sizes.

    The first dimension of the arrays may differ between ranks, or is cut into ``counts``; all
    other dimensions and the dtype are the same everywhere. ``op`` and ``order`` are those of
    `Communicator.all_reduce`. With ``return_counts`` a call returns its result and the number of
    rows that came from each rank, an array of int64.
    """

    _session: Session

    @overload
    def all_gather_v(
        self,
        x: _A,
        *,
        out: _A | None = None,
        return_counts: Literal[False] = False,
        timeout: float | None = None,
    ) -> _A: ...

    @overload
    def all_gather_v(
        self,
        x: _A,
        *,
        out: _A | None = None,
        return_counts: Literal[True],
        timeout: float | None = None,
    ) -> tuple[_A, _Rows]: ...

    @v_variant(Kind.ALL_GATHER_V)
    @reports_misuse
    def all_gather_v(
        self,
        x: Any,
        *,
        out: Any = None,
        return_counts: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Concatenate arrays whose first dimensions may differ; every rank gets the result."""
        kind = Kind.ALL_GATHER_V
        return v_variants.gather(self._session, kind, x, 0, out, timeout, counted=return_counts)

    @v_variant(Kind.GATHER_V)
    @reports_misuse
    def gather_v(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        return_counts: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Concatenate arrays whose first dimensions may differ on the root; others get None.

        With ``return_counts`` the others get None and the counts.
        """
        kind = Kind.GATHER_V
        return v_variants.gather(self._session, kind, x, root, out, timeout, counted=return_counts)

    @v_variant(Kind.SCATTER_V)
    @reports_misuse
    def scatter_v(
        self,
        x: _A | None,
        counts: Counts,
        root: int = 0,
        *,
        out: _A | None = None,
        timeout: float | None = None,
    ) -> _A:
        """Give rank r the next ``counts[r]`` rows of the root's array; same counts everywhere.

        On other ranks ``x`` only tells dtype and shape of a row: an array of no rows will do, and
        None where there is ``out``.
        """
        result: _A = v_variants.scatter(self._session, x, counts, root, out, timeout)
        return result

    @v_variant(Kind.REDUCE_SCATTER_V)
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

    @overload
    def all_to_all_v(
        self,
        x: _A,
        counts: Counts,
        *,
        out: _A | None = None,
        return_counts: Literal[False] = False,
        timeout: float | None = None,
    ) -> _A: ...

    @overload
    def all_to_all_v(
        self,
        x: _A,
        counts: Counts,
        *,
        out: _A | None = None,
        return_counts: Literal[True],
        timeout: float | None = None,
    ) -> tuple[_A, _Rows]: ...

    @v_variant(Kind.ALL_TO_ALL_V)
    @reports_misuse
    def all_to_all_v(
        self,
        x: Any,
        counts: Counts,
        *,
        out: Any = None,
        return_counts: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send the next ``counts[j]`` rows to rank j; get the rows from each rank, in order."""
        return v_variants.all_to_all(self._session, x, counts, out, timeout, counted=return_counts)
