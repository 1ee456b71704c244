"""PowerSGD: gradients as products of two thin matrices."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from pycoll import kernels
from pycoll.parallel.channels import Channel, Pending
from pycoll.parallel.hooks.error_feedback import ErrorFeedback
from pycoll.parallel.settings import check_number
from pycoll.parallel.state.layout import Entry, Layout


class PowerSGD(ErrorFeedback):
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

    def __init__(self, rank: int = 4) -> None:
        """Choose the rank of the approximations."""
        check_number("rank", rank, "[1, inf)", whole=True)
        super().__init__("error", "basis")
        self.rank = rank

    def _matrices(self, layout: Layout) -> tuple[list[Entry], list[Entry]]:
        """Divide the entries into those that are compressed and the others."""
        small, plain = list[Entry](), list[Entry]()
        for entry in layout.entries:
            shape = entry.parameter.spec.shape
            rows = shape[0] if len(shape) > 1 else 1
            size = entry.parameter.size
            gains = rows > 1 and self.rank * (rows + size // rows) < size
            (small if gains else plain).append(entry)
        return small, plain

    def _basis(self, entry: Entry, columns: int, dtype: Any) -> Any:
        name = entry.parameter.name
        basis = self._get("basis", name)
        if basis is None:  # the same on every rank
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            basis = rng.standard_normal((columns, self.rank)).astype(dtype)
        return basis

    def all_reduce(
        self, key: str, data: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket over the ranks; see `Hook.all_reduce`."""
        whole = self._add_unsent(key, data, channel)
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
            found = _unpack(total, shapes)
            for entry, values in zip(plain, found[len(small) :], strict=True):
                data[entry.start : entry.stop] = values
                whole[entry.start : entry.stop] = 0
            self._reduce_bases(small, found, whole, data, channel, order)
            if not kernels.count_nonfinite(whole):
                self._put("error", key, whole)
            return data

        return first.then(finish)

    def _reduce_bases(
        self,
        small: list[Entry],
        sums: list[Any],
        error: Any,
        data: Any,
        channel: Channel,
        order: str,
    ) -> None:
        """Sum Q over the ranks, form the approximation and this rank's error."""
        if not small:
            return
        left = [_orthonormal(p) for p in sums[: len(small)]]
        own = [_matrix(error, e).T @ p for e, p in zip(small, left, strict=True)]
        vector, shapes = _pack(own, channel, data.dtype)
        total = _unpack(channel.all_reduce(vector, "gradient", order).wait(), shapes)
        for entry, p, mine, q in zip(small, left, own, total, strict=True):
            _multiply(p, q, _matrix(data, entry))
            _matrix(error, entry)[...] -= p @ mine.T
            self._put("basis", entry.parameter.name, _scaled(q))

    def _fits(self, table: str, array: Any) -> bool:
        return table == "error" or array.shape[1:] == (self.rank,)


def _matrix(flat: Any, entry: Entry) -> Any:
    return flat[entry.start : entry.stop].reshape(entry.parameter.spec.shape[0], -1)


def _orthonormal(matrix: Any) -> Any:
    """Return orthonormal columns that span those of a tall matrix, by Householder's reflections."""
    # All ranks need the same bits. Those of LAPACK depend on the processor and the number of
    # threads; sums by NumPy do not.
    rest, reflections = matrix.astype(np.float64), []
    for j in range(rest.shape[1]):
        v = _scaled(rest[j:, j])
        v[0] += np.copysign(np.sqrt(np.sum(v * v)), v[0])
        size = np.sum(v * v)
        if size > 0:  # else the column is zero, and stays
            reflections.append((j, v, 2 / size))
            _reflect(rest, *reflections[-1])
    found = np.eye(*rest.shape)
    for reflection in reversed(reflections):
        _reflect(found, *reflection)
    return found.astype(matrix.dtype)


def _reflect(matrix: Any, j: int, v: Any, factor: float) -> None:
    for column in matrix[j:].T:
        column -= factor * np.sum(v * column) * v


def _multiply(p: Any, q: Any, out: Any) -> None:
    """Form ``p @ q.T`` with the same bits on every rank, whatever its BLAS; see `_orthonormal`."""
    np.multiply(p[:, :1], q[:, 0], out=out)
    for i in range(1, p.shape[1]):
        out += p[:, i : i + 1] * q[:, i]


def _scaled(basis: Any) -> Any:
    """Divide by the power of two that makes numbers at most 1; products then cannot overflow."""
    return np.ldexp(basis, -np.frexp(np.abs(basis).max(initial=0))[1])


def _pack(parts: list[Any], channel: Channel, dtype: Any) -> tuple[Any, list[tuple[int, ...]]]:
    vector = channel.empty(sum(part.size for part in parts), dtype, "hook")
    np.concatenate([part.reshape(-1) for part in parts], out=vector)
    return vector, [part.shape for part in parts]


def _unpack(vector: Any, shapes: list[tuple[int, ...]]) -> list[Any]:
    stops = np.cumsum([np.prod(shape) for shape in shapes])
    parts = np.split(vector, stops[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
