"""Calls on lists of tensors that the engine reads or writes in place."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from pycoll.torch.calls.prepare import Calls
from pycoll.torch.tensors.layout import Request, Tensors, code
from pycoll.types import Kind

LEAST_BYTES = 4 << 20
"""Of a list at new addresses: to bind these takes longer than to copy fewer bytes."""

_MAX_KNOWN = 256


class ListCalls:
    """The all_gather, gather and scatter of a group whose tensors come in lists.

    To the peers such a call is like one on a flat tensor. Not so a scatter: peers cannot know where
    the root's tensors are, so it never has the alternative in which they read from there.
    """

    def __init__(self, calls: Calls) -> None:
        """Serve a group with its other calls."""
        self._calls = calls
        self._known: dict[tuple, Any] = {}  # None: such a list came once

    def wants(self, one: torch.Tensor) -> bool:
        """Tell whether this is for blocks like one; the answer is the same on every rank."""
        return self._calls.direct and one.is_cpu and one.numel() > 0

    def takes(self, kind: Kind, parts: Tensors, one: torch.Tensor, root: int) -> bool:
        """Tell whether the engine should read or write the blocks of all ranks in place.

        Args:
            kind: See `run`.
            parts: Contiguous tensors, one for each rank.
            one: This rank's block, contiguous; may be one of the parts.
            root: Root rank, or 0.
        """
        own, spans = _span(one), list(map(_span, parts))
        mine = spans[self._calls.session.rank] == own
        ordered = sorted(spans if mine else [*spans, own])
        alike = all(part.is_cpu and part.nbytes == one.nbytes for part in parts)
        apart = all(a[1] <= b[0] for a, b in pairwise(ordered))
        in_step = all((s[0] - ordered[0][0]) % one.element_size() == 0 for s in spans)
        if not (alike and apart and in_step):
            return False
        key = self._key(kind, one, parts, root)
        seen = key in self._known
        if not seen:
            self._know(key, None)
        return seen or one.nbytes * len(parts) >= LEAST_BYTES

    def _key(self, kind: Kind, one: torch.Tensor, parts: Tensors | None, root: int) -> tuple:
        first, size = _first(parts), one.element_size()
        offsets = tuple((part.data_ptr() - first) // size for part in parts or ())
        return kind, code(one.dtype), one.numel(), root, offsets

    def _know(self, key: tuple, bound: Any) -> None:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = bound

    def run(self, request: Request, one: torch.Tensor, parts: Tensors | None) -> None:
        """Run a call.

        Args:
            request: An ALL_GATHER, GATHER or SCATTER.
            one: This rank's block: its input, or for SCATTER its output.
            parts: The blocks of all ranks; None on a rank that has none.
        """
        kind, _, root, site, timeout_s = request
        first, key = _first(parts), self._key(kind, one, parts, root)
        bound = self._known.get(key)
        if bound is None:
            bound = self._bind(kind, one, root, key[-1])
            self._know(key, bound)
        ends = (first, one.data_ptr()) if kind == Kind.SCATTER else (one.data_ptr(), first)
        session = self._calls.session
        session.guard(session.engine.run, bound, *ends, site, timeout_s)

    def _bind(self, kind: Kind, one: torch.Tensor, root: int, offsets: tuple[int, ...]) -> Any:
        session, size = self._calls.session, one.element_size()
        count = one.numel() * session.world_size
        spec = self._calls.spec((kind, code(one.dtype), count, None, root, False), size, None)
        if kind == Kind.SCATTER:
            spec = replace(spec, alternative=None)
        return session.bind(spec, np.array(offsets) if offsets else None)


def _first(parts: Tensors | None) -> int:
    return min((part.data_ptr() for part in parts or ()), default=0)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
