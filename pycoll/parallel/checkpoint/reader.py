"""Arrays of a checkpoint: any part of one, in whatever pieces it was written; and their hashes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.checkpoint.hashes import hash_of, kind_of
from pycoll.parallel.checkpoint.manifest import Damaged, Manifest, Piece, Tensor
from pycoll.parallel.precision import dtype_of
from pycoll.parallel.state.parts import Part


def safetensors() -> Any:
    """Return the package safetensors with its part for NumPy.

    Raises:
        ArgumentError: If it is missing.
    """
    try:
        import safetensors.numpy
    except ModuleNotFoundError:
        raise ArgumentError(
            "checkpoints need the package safetensors: pip install safetensors"
        ) from None
    return safetensors


class Reader:
    """Reads one checkpoint.

    Attributes:
        path: Where it is.
        manifest: What it has.
    """

    def __init__(self, path: str) -> None:
        """Read the manifest.

        Raises:
            Damaged: If it cannot be used.
        """
        self.path = path
        self.manifest: Manifest = Manifest.read(path)
        self._library = safetensors()
        self._open: dict[str, Any] = {}

    def part(self, part: Part) -> np.ndarray:
        """Return the elements of a part, ``[stop - start]``, in the type they were saved in."""
        tensor = self.manifest.tensors[part.kind][part.name]
        if all(piece.box != part.box for piece in tensor.pieces):
            box = tuple(slice(a, b) for a, b in part.box)
            return self.whole(part.kind, part.name)[box].reshape(-1)[part.start : part.stop]
        out = np.empty(part.stop - part.start, dtype_of(tensor.dtype))
        for piece in tensor.pieces:
            lo, hi = max(part.start, piece.start), min(part.stop, piece.stop)
            if piece.box == part.box and lo < hi:
                out[lo - part.start : hi - part.start] = self._run(piece, lo, hi)
        return out

    def whole(self, kind: str, name: str) -> np.ndarray:
        """Return an array in full."""
        tensor = self.manifest.tensors[kind][name]
        out = np.empty(tensor.shape, dtype_of(tensor.dtype))
        for piece in tensor.pieces:
            box = out[(*(slice(a, b) for a, b in piece.box), ...)]
            box.flat[piece.start : piece.stop] = self._run(piece, piece.start, piece.stop)
        return out

    def verify(self, first: int = 0, step: int = 1) -> int:
        """Compare every `step`-th file from `first` on with the hashes; return the bytes read.

        Raises:
            Damaged: If a file is missing, cut off or changed, naming it and the array.
        """
        chosen, total = self.manifest.files[first::step], 0
        for what, tensor, piece in self.manifest.pieces():
            if piece.file in chosen:
                total += self._verify(what, tensor, piece)
        return total

    def _verify(self, what: str, tensor: Tensor, piece: Piece) -> int:
        data = self._get(piece)
        if data.dtype.name != tensor.dtype or data.size != piece.stop - piece.start:
            raise Damaged(
                f"{self._file(piece)}: {what} is {data.dtype}{list(data.shape)}, expected "
                f"{piece.stop - piece.start} elements of {tensor.dtype}"
            )
        if hash_of(data, kind_of(piece.hash)) != piece.hash:
            raise Damaged(f"{self._file(piece)}: {what} was changed: its hash is another")
        return data.nbytes

    def _run(self, piece: Piece, lo: int, hi: int) -> np.ndarray:
        """Return elements ``[lo, hi)`` of the box of a piece that has them."""
        return self._get(piece, slice(lo - piece.start, hi - piece.start))

    def _get(self, piece: Piece, run: slice = slice(None)) -> np.ndarray:
        """Return elements of a piece: a flat run of a box, or the whole of it in its shape."""
        try:
            if piece.file not in self._open:
                path = os.path.join(self.path, piece.file)
                self._open[piece.file] = self._library.safe_open(path, framework="numpy")
            found = self._open[piece.file].get_slice(piece.key)
            if len(found.get_shape()) == 1:
                return found[run]
            return self._open[piece.file].get_tensor(piece.key).reshape(-1)[run]
        except (OSError, self._library.SafetensorError) as error:
            raise Damaged(f"{self._file(piece)} cannot be read: {error}") from error

    def _file(self, piece: Piece) -> str:
        return os.path.join(self.path, piece.file)

    def close(self) -> None:
        """Close the files."""
        self._open.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
