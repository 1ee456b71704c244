"""PowerSGD: gradients as products of two thin matrices."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from pycoll import kernels
from pycoll.parallel.hooks import Hook, Then, rescale_unsent, unsent
from pycoll.parallel.ledger import Channel, Pending
from pycoll.parallel.limits import check_number
from pycoll.parallel.units import Entry, Layout


class PowerSGD(Hook):
    """Sends rank-r approximations of the gradient matrices.

    A gradient of shape ``[rows, ...]`` is a matrix M of that many rows. One step of subspace
    iteration, started where the last one ended, gives ``M ~ P Q^T``: P = M Q is added over the
    ranks and made orthonormal, then Q = M^T P is added over the ranks. What the approximation
    misses is added to the next gradient. Parameters with one dimension, and matrices too small to
    gain, are sent as they are. Bytes per matrix: ``2 (n - 1) / n * r * (rows + columns)`` elements
    instead of ``2 (n - 1) / n * rows * columns``.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for
    distributed optimization", NeurIPS 2019, algorithms 1 and 2.
    """

    stages = (0, 1, 2)

    def __init__(self, rank: int = 4) -> None:
        """Choose the rank of the approximations."""
        check_number("rank", rank, "[1, inf)", whole=True)
        self.rank = rank
        self._errors: dict[str, Any] = {}
        self._bases: dict[str, Any] = {}

    def _matrices(self, layout: Layout) -> tuple[list[Entry], list[Entry]]:
        """Divide the entries into those that are compressed and the others."""
        small, plain = [], []
        for entry in layout.entries:
            shape = entry.parameter.spec.shape
            rows = shape[0] if len(shape) > 1 else 1
            size = entry.parameter.size
            gains = rows > 1 and self.rank * (rows + size // rows) < size
            (small if gains else plain).append(entry)
        return small, plain

    def _basis(self, entry: Entry, columns: int, dtype: Any) -> Any:
        name = entry.parameter.name
        if name not in self._bases:  # the same on every rank
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            self._bases[name] = rng.standard_normal((columns, self.rank)).astype(dtype)
        return self._bases[name]

    def all_reduce(
        self, key: str, data: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket over the ranks; see `Hook.all_reduce`."""
        error = unsent(self, self._errors, key, data, channel)
        whole = error + data
        small, plain = self._matrices(layout)
        parts = []
        for entry in small:
            matrix = _matrix(whole, entry)
            parts.append(matrix @ self._basis(entry, matrix.shape[1], data.dtype))
        parts += [whole[entry.start : entry.stop] for entry in plain]
        vector, shapes = _pack(parts, channel, data.dtype)
        first = channel.all_reduce(vector, "gradient", order)

        def finish(total: Any) -> Any:
            if kernels.count_nonfinite(total):  # on every rank: the step will not be taken
                data[: layout.count] = np.nan
                return data
            whole, found = error + data, _unpack(total, shapes)
            for entry, values in zip(plain, found[len(small) :], strict=True):
                data[entry.start : entry.stop] = values
                whole[entry.start : entry.stop] = 0
            self._second(small, found, whole, data, channel, order)
            if not kernels.count_nonfinite(data) and not kernels.count_nonfinite(whole):
                error[...] = whole
            return data

        return Then(first, finish)

    reduce_scatter = Hook.take_block

    def _second(
        self,
        small: list[Entry],
        sums: list[Any],
        error: Any,
        data: Any,
        channel: Channel,
        order: str,
    ) -> None:
        """Form Q over all ranks, the approximation, and what this rank's gradient lacks of it."""
        if not small:
            return
        left = [np.linalg.qr(p)[0] for p in sums[: len(small)]]
        own = [_matrix(error, e).T @ p for e, p in zip(small, left, strict=True)]
        vector, shapes = _pack(own, channel, data.dtype)
        total = _unpack(channel.all_reduce(vector, "gradient", order).wait(), shapes)
        for entry, p, mine, q in zip(small, left, own, total, strict=True):
            _matrix(data, entry)[...] = p @ q.T
            _matrix(error, entry)[...] -= p @ mine.T
            if not kernels.count_nonfinite(data[entry.start : entry.stop]):
                self._bases[entry.parameter.name] = _scaled(q)

    def rescale(self, factor: float) -> None:
        """Give what is unsent the scale of the next gradients; see `Hook.rescale`."""
        rescale_unsent(self._errors, factor)

    def state(self) -> dict[str, Any]:
        """Return what has not been sent yet by bucket, and where the iterations stand."""
        return {
            **{f"error {key}": error.copy() for key, error in self._errors.items()},
            **{f"basis {name}": basis.copy() for name, basis in self._bases.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take what `state` gave on this rank."""
        for table, prefix in ((self._errors, "error "), (self._bases, "basis ")):
            table.clear()
            table.update(
                {
                    key.removeprefix(prefix): np.array(x)
                    for key, x in state.items()
                    if key.startswith(prefix)
                }
            )


def _matrix(flat: Any, entry: Entry) -> Any:
    return flat[entry.start : entry.stop].reshape(entry.parameter.spec.shape[0], -1)


def _scaled(basis: Any) -> Any:
    """Divide by the power of two that makes numbers at most 1: no digit changes.

    Only directions matter, and with numbers as large as gradients their product would overflow, or
    vanish, at the square root of what a gradient may be.
    """
    return np.ldexp(basis, -np.frexp(np.abs(basis).max(initial=0))[1])


def _pack(parts: list[Any], channel: Channel, dtype: Any) -> tuple[Any, list[tuple[int, ...]]]:
    shapes = [part.shape for part in parts]
    vector = channel.empty(sum(part.size for part in parts), dtype, "hook")
    at = 0
    for part in parts:
        vector[at : at + part.size] = part.reshape(-1)
        at += part.size
    return vector, shapes


def _unpack(vector: Any, shapes: list[tuple[int, ...]]) -> list[Any]:
    found, at = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        found.append(vector[at : at + size].reshape(shape))
        at += size
    return found
