"""Calls made before: a program makes the same ones again and again, and they are checked once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from pycoll.cuda.device import arrays
from pycoll.runtime.calls.prepared import CallRequest, Prepared

_MAX_CALLS = 1024


class MadeBefore:
    """What preparing a call has found out, by what was asked for and where the arrays lie.

    It knows calls on contiguous arrays of CuPy and PyTorch that are used where they are, and keeps
    no array alive: addresses, shapes and types decide.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._ndarray = arrays.cupy().ndarray
        self._calls: dict[tuple[Any, ...], tuple[list[Prepared], Any]] = {}

    def key(self, request: CallRequest, stream: int, *given: Any) -> tuple[Any, ...] | None:
        """Return what decides a call, or None where that is more than this class knows.

        Args:
            request: What was asked for.
            stream: Handle of the stream on which the arrays will be used.
            *given: Arrays, lists of arrays, None, or numbers on which it depends too.
        """
        places = [None if x is None else self._place(x, stream) for x in given]
        if any(place is False for place in places):
            return None
        key = (request, type(request.root), *places)  # True equals 1, and is refused
        try:
            hash(key)
        except TypeError:  # an operation that is wrong: preparing says so
            return None
        return key

    def _place(self, x: Any, stream: int) -> Any:
        if type(x) is int:
            return x
        if isinstance(x, (list, tuple)):
            places = tuple(None if part is None else self._place(part, stream) for part in x)
            return False if any(place is False for place in places) else places
        if isinstance(x, self._ndarray) and x.size and x.flags.c_contiguous:
            return x.data.ptr, x.shape, x.dtype, x.device.id
        torch = sys.modules.get("torch")
        if torch is not None and type(x) is torch.Tensor and x.is_cuda:
            # On another stream DLPack makes it wait for the current one, in every call.
            current = torch.cuda.current_stream(x.device).cuda_stream == stream
            if current and x.numel() and x.is_contiguous() and not x.requires_grad:
                return x.data_ptr(), x.shape, x.dtype, x.get_device(), x.is_neg(), x.is_conj()
        return False

    def find(
        self, key: tuple[Any, ...] | None, keep: tuple[Any, ...], results: Iterable[Any]
    ) -> Any:
        """Return the calls of the ranks anew, and what `note` was given, or None.

        Args:
            key: See `key`.
            keep: Arrays that stay alive until the calls are done.
            results: What they return, by rank.
        """
        found = None if key is None else self._calls.get(key)
        if found is None:
            return None
        calls, more = found
        again = [
            Prepared(c.binding, c.in_ptr, c.out_ptr, result, keep, spec=c.spec)
            for c, result in zip(calls, results, strict=True)
        ]
        return again, more

    def note(
        self, key: tuple[Any, ...] | None, calls: Sequence[Prepared], more: Any = None
    ) -> None:
        """Remember the calls of the ranks, unless they work on copies."""
        if key is None or any(c.gathers or c.scatters or c.registered for c in calls):
            return
        if len(self._calls) >= _MAX_CALLS:
            self._calls.clear()
        bare = [Prepared(c.binding, c.in_ptr, c.out_ptr, None, (), spec=c.spec) for c in calls]
        self._calls[key] = bare, more
