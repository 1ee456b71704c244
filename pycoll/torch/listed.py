"""Calls on lists of tensors whose blocks the engine reads or writes where they lie."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pycoll.torch.tensors import code
from pycoll.torch.work import Tensors
from pycoll.types import Kind

if TYPE_CHECKING:
    from pycoll.torch.calls import Calls

_MAX_BOUND = 64


class Listed:
    """The all_gather, gather and scatter of a group whose tensors come in lists.

    Such a call and one on a flat tensor are alike to the peers, but for scatter: what the root
    reads lies where nobody else knows, so it never has the alternative that others read it there.
    """

    def __init__(self, calls: Calls) -> None:
        """Serve a group with its other calls."""
        self._calls = calls
        self._bound: dict[tuple, Any] = {}

    def wants(self, one: torch.Tensor) -> bool:
        """Tell whether this is for blocks like one; the answer is the same on every rank."""
        return self._calls.direct and one.is_cpu and one.numel() > 0

    def takes(self, parts: Tensors, one: torch.Tensor) -> bool:
        """Tell whether the blocks of all ranks can be read or written where they are.

        Args:
            parts: Contiguous tensors, one for each rank.
            one: This rank's block, contiguous. It may be its tensor among `parts`.
        """
        own, spans = _span(one), list(map(_span, parts))
        mine = spans[self._calls.session.rank] == own
        ordered = sorted(spans if mine else [*spans, own])
        alike = all(part.is_cpu and part.nbytes == one.nbytes for part in parts)
        apart = all(a[1] <= b[0] for a, b in pairwise(ordered))
        in_step = all((s[0] - ordered[0][0]) % one.element_size() == 0 for s in spans)
        return alike and apart and in_step

    def move(
        self,
        kind: Kind,
        one: torch.Tensor,
        parts: Tensors | None,
        root: int,
        site: int,
        timeout_s: float,
    ) -> None:
        """Run a call.

        Args:
            kind: ALL_GATHER, GATHER or SCATTER.
            one: This rank's block: its input, or for SCATTER its output.
            parts: The blocks of all ranks; None where there are none.
            root: Root rank, or 0.
            site: See `Calls.reduce`.
            timeout_s: See `Calls.reduce`.
        """
        first = min(part.data_ptr() for part in parts) if parts else 0
        size = one.element_size()
        offsets = tuple((part.data_ptr() - first) // size for part in parts or ())
        key = kind, code(one.dtype), one.numel(), root, offsets
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= _MAX_BOUND:
                self._bound.clear()
            bound = self._bound[key] = self._bind(kind, one, root, offsets)
        ends = (first, one.data_ptr()) if kind == Kind.SCATTER else (one.data_ptr(), first)
        session = self._calls.session
        session.guard(session.engine.run, bound, *ends, site, timeout_s)

    def _bind(self, kind: Kind, one: torch.Tensor, root: int, offsets: tuple[int, ...]) -> Any:
        session, size = self._calls.session, one.element_size()
        count = one.numel() * session.world_size
        spec = self._calls.spec(kind, code(one.dtype), count, None, root, False, size, None)
        if kind == Kind.SCATTER:
            spec = replace(spec, alternative=None)
        return session.bind(spec, np.array(offsets) if offsets else None)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
