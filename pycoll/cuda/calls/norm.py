"""all_reduce, residual add and RMSNorm of virtual ranks: from arguments to what is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_void_p, cast
from functools import partial
from typing import Any

import numpy as np

from pycoll.config import check_timeout
from pycoll.cuda.calls.in_order import LaunchOrder
from pycoll.cuda.device import arrays
from pycoll.cuda.device.library import Norm, library, pointers
from pycoll.cuda.transports.bound_calls import TIMEOUT_S, nanoseconds
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import ArrayView
from pycoll.runtime.arrays.rms_norm import NormArrays, check_eps, check_norm, check_order

_SMALL_BYTES = 64 << 10  # of all rows: up to there each rank makes them for itself
ONE_SHOT, TWO_SHOT = "one_shot", "two_shot_push"


class NormRanks:
    """A part of `pycoll.VirtualRanks`."""

    device: int
    _cupy: Any
    _group: int
    _launches: LaunchOrder
    check: Callable[[], None]
    _split: Callable[[Any, str], list[Any]]

    def all_reduce_rms_norm(
        self,
        xs: Any,
        weight: Any,
        residual: Any = None,
        eps: float = 1e-6,
        *,
        out: Any = None,
        residual_out: Any = None,
        order: str | None = None,
        algorithm: str | None = None,
        timeout: float | None = None,
        stream: Any = None,
        **form: int,
    ) -> Any:
        """Add the rows of all ranks, add a residual, and normalise, in one launch.

        ``h = sum(xs) + residual; y = h / sqrt(mean(h * h) + eps) * weight`` for each row, with the
        bits of `pycoll.Communicator.all_reduce_rms_norm`, which has the details.

        Args:
            xs: Rows of the ranks, ``[..., hidden]`` each: n arrays, or one with a first axis of n.
            weight: ``[hidden]``, the same for all ranks.
            residual: Like ``xs``, with the same contents on all ranks, or None.
            eps: Added to the mean.
            out: Arrays for y, like ``xs``; they may be those of ``xs``.
            residual_out: Arrays for h, likewise; they may be those of ``residual``.
            order: ``tree`` or ``rank``; see `pycoll.Communicator.all_reduce`.
            algorithm: ``one_shot``, where each rank makes all rows for itself, or
                ``two_shot_push``, where it makes a share of them for all; by default by size.
            timeout: Seconds until a rank that waits for another one gives up.
            stream: Where it runs.
            **form: ``blocks``, ``threads``, ``absent``: see `pycoll.VirtualRanks.launch`.

        Returns:
            y of the ranks, in the form of ``xs``; with a residual y and h.
        """
        limit = TIMEOUT_S if timeout is None else check_timeout(timeout)
        self.check()
        stream = self._cupy.cuda.get_current_stream() if stream is None else stream
        handle = arrays.stream_of(stream)
        with self._cupy.cuda.Device(self.device), arrays.external(handle):
            given = {"xs": xs, "residual": residual, "out": out, "residual_out": residual_out}
            split = [self._split(v, what) for what, v in given.items()]
            call = NormCall(self.device, handle, weight, *split, eps, order, algorithm)
            results = call.results(xs, out, residual_out)
            launch = partial(self._launch_norm, call.norm(), nanoseconds(limit), handle, **form)
            capturing = self._launches.capturing(handle)
            self._launches.put([] if capturing else [call], handle, capturing, launch)
        return results

    def _launch_norm(
        self,
        norm: Norm,
        limit_ns: int,
        stream: int,
        blocks: int = 0,
        threads: int = 0,
        absent: int = 0,
    ) -> None:
        form = blocks, threads, limit_ns, absent, stream
        library().call("rms_norm", self._group, byref(norm), *form)


class NormCall:
    """One call: the arrays of all ranks, checked, and what the library takes."""

    def __init__(
        self,
        device: int,
        stream: int,
        weight: Any,
        xs: Sequence[Any],
        residuals: Sequence[Any],
        outs: Sequence[Any],
        kept: Sequence[Any],
        eps: Any,
        order: str | None,
        algorithm: str | None,
    ) -> None:
        """Check everything; nothing is made or launched.

        Args:
            device: Number of the device.
            stream: Handle of the stream on which the arrays will be used.
            weight: See `pycoll.VirtualRanks.all_reduce_rms_norm`, here and below.
            xs: Arrays of the ranks.
            residuals: Likewise, or None for each.
            outs: Likewise.
            kept: Arrays for the new residuals, likewise.
            eps: See there.
            order: See there.
            algorithm: See there.

        Raises:
            ArgumentError: If something cannot be used.
        """
        self._device, self._stream = device, stream
        self._numbers = check_eps(eps), check_order(order) == "tree"
        self._algorithm = algorithm
        given = zip(xs, residuals, outs, kept, strict=True)
        self.ranks: list[NormArrays] = [
            check_norm(self._look, x, weight, r, y, h) for x, r, y, h in given
        ]
        if len({(v.x.dtype, tuple(v.x.array.shape)) for v in self.ranks}) > 1:
            raise ArgumentError("the arrays of all ranks must have the same shape and dtype")
        for name in ("residual", "out", "residual_out"):
            if len({getattr(v, name) is None for v in self.ranks}) > 1:
                raise ArgumentError(f"{name} is given for some ranks only; pass it for all or none")
        _check_apart(self.ranks)
        self._push = _is_pushed(self.ranks, algorithm)

    def results(self, xs: Any, out: Any, residual_out: Any) -> Any:
        """Make the arrays that the caller has not given; return what the call returns."""
        y = self._made("out", xs, out)
        if self.ranks[0].residual is None:
            return y
        return y, self._made("residual_out", xs, residual_out)

    def norm(self) -> Norm:
        """Return it as the library takes it."""
        first = self.ranks[0]
        names = "x", "residual", "out", "residual_out"
        addresses = [_addresses(self.ranks, name) for name in names]
        eps, tree = self._numbers
        self._alive = addresses  # as long as this call
        return Norm(
            *(cast(a, POINTER(c_void_p)) for a in addresses),
            first.weight.pointer,
            first.rows,
            first.hidden,
            eps,
            int(first.x.dtype),
            tree,
            self._push,
        )

    def _look(self, x: Any, what: str) -> ArrayView:
        v = arrays.device_view(x, what, self._stream)
        if v.array.size and arrays.device_of(v) != self._device:
            raise ArgumentError(
                f"{what} lies on device {arrays.device_of(v)}, expected device {self._device}"
            )
        if not v.array.flags.c_contiguous:
            raise ArgumentError(f"{what} is not C-contiguous; pass a contiguous copy")
        return v

    def _made(self, name: str, xs: Any, given: Any) -> Any:
        if given is not None:
            return given
        n, like = len(self.ranks), self.ranks[0].x
        shape = tuple(like.array.shape)
        stacked = not isinstance(xs, (list, tuple))
        if stacked:
            made = arrays.new_like(like, (n, *shape))
        else:
            made = [arrays.new_like(v.x, shape) for v in self.ranks]
        views = [self._look(made[rank], name) for rank in range(n)]
        pairs = zip(self.ranks, views, strict=True)
        self.ranks = [v._replace(**{name: target}) for v, target in pairs]
        return made


def _addresses(ranks: Sequence[NormArrays], name: str) -> Any:
    found = [getattr(v, name) for v in ranks]
    return None if found[0] is None else pointers(v.pointer for v in found)


def _is_pushed(ranks: Sequence[NormArrays], algorithm: str | None) -> bool:
    """Choose the way: both have the same bits."""
    if algorithm not in (None, ONE_SHOT, TWO_SHOT):
        raise ArgumentError(f"algorithm={algorithm!r}; accepted: {ONE_SHOT!r}, {TWO_SHOT!r}")
    outs = [v.out and v.out.pointer for v in ranks]
    in_place = len(ranks) > 1 and any(o == v.x.pointer for o, v in zip(outs, ranks, strict=True))
    if algorithm == ONE_SHOT and in_place:
        raise ArgumentError(f"{ONE_SHOT} does not work in place: peers read x while out is written")
    if algorithm is not None:
        return algorithm == TWO_SHOT
    return in_place or ranks[0].x.array.nbytes > _SMALL_BYTES


def _check_apart(ranks: Sequence[NormArrays]) -> None:
    """Refuse an output that shares memory with an array of another rank, or with the weight."""
    names = [n for n in NormArrays._fields if n != "weight" and getattr(ranks[0], n) is not None]
    views = [[getattr(v, name) for name in names] for v in ranks]
    low = np.array([[v.pointer for v in row] for row in views], np.int64)
    high = low + ranks[0].x.array.nbytes
    for name in ("out", "residual_out"):
        if name not in names:
            continue
        begin, end = low[:, names.index(name)], high[:, names.index(name)]
        shared = (begin[:, None, None] < high[None]) & (low[None] < end[:, None, None])
        shared &= ~np.eye(len(ranks), dtype=bool)[:, :, None]
        if shared.any():
            a, b, other = np.argwhere(shared)[0].tolist()
            raise ArgumentError(f"{name} of rank {a} overlaps {names[other]} of rank {b}")
