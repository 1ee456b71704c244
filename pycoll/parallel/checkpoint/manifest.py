"""The manifest of a checkpoint: which elements of which array are in which file.

Everything in it comes from outside, so it is checked once, here: a manifest that was read without
an error names plain files, and its pieces are every element of every array once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import prod
from operator import index
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.checkpoint.folder import MANIFEST
from pycoll.parallel.checkpoint.hashes import kind_of
from pycoll.parallel.state.parts import Box

FORMAT, FIRST_FORMAT = "pycoll checkpoint 2", "pycoll checkpoint 1"
PARAMETERS = "parameters"


class Damaged(ArgumentError):
    """A checkpoint cannot be used by anybody: a file is missing, cut off or changed."""


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)``, in row-major order, of a box of an array.

    Attributes:
        file: Name of the file.
        key: Name of the tensor in the file.
        box: Start and stop along each axis of the whole array.
        start: First element.
        stop: Behind the last one.
        hash: Of the bytes, such as ``"blake3:af13..."``.
    """

    file: str
    key: str
    box: Box
    start: int
    stop: int
    hash: str

    @property
    def size(self) -> int:
        """Elements of the box."""
        return prod(b - a for a, b in self.box)


@dataclass(frozen=True)
class Tensor:
    """An array: its type as NumPy names it, its shape, and where its elements are."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint has.

    Attributes:
        steps: Steps that were taken.
        loss_scale: Scale of the loss, and good steps since it changed; None: of no use there.
        mesh: Axes of the mesh that has saved it; nothing depends on them.
        extra: What the program has added.
        tensors: Arrays by kind and name. Kinds are ``"parameters"``, those of the optimizer's
            states, and ``"hook of ..."``, which one rank of one mesh alone can use.
    """

    steps: int
    loss_scale: tuple[float, int] | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    extra: Any = None
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """Names of all files."""
        return sorted({piece.file for _, _, piece in self.pieces()})

    def pieces(self) -> Iterable[tuple[str, Tensor, Piece]]:
        """Yield all pieces, with the name and the array of each."""
        for kind, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                for piece in tensor.pieces:
                    yield f"{name} in {kind}", tensor, piece

    def to_json(self) -> str:
        """Return the text of the file."""
        body = json.loads(json.dumps(asdict(self) | {"format": FORMAT}))  # as it will be read
        return json.dumps({"digest": _digest(body), **body})

    @classmethod
    def read(cls, path: str) -> Manifest:
        """Read and check the manifest of a checkpoint.

        Raises:
            Damaged: If it is not one, or was changed.
        """
        try:
            with open(os.path.join(path, MANIFEST), encoding="utf-8") as file:
                body = json.load(file)
            digest = body.pop("digest")
            if body["format"] not in (FORMAT, FIRST_FORMAT):
                raise ValueError(f"its format is {body['format']!r}, expected {FORMAT!r}")
            if digest != _digest(body):
                raise ValueError("its digest is not that of its text")
            del body["format"]
            found = cls(**body | {"tensors": _tensors(body["tensors"])})
            _check(found)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            what = str(error) or type(error).__name__
            what = f"it has no {what}" if isinstance(error, KeyError) else what
            raise Damaged(f"{os.path.join(path, MANIFEST)} cannot be used: {what}") from error
        return found


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _tensors(kinds: Any) -> dict[str, dict[str, Tensor]]:
    def piece(found: Any) -> Piece:
        box = tuple((index(a), index(b)) for a, b in found["box"])
        if "sha256" in found:  # of the first format
            found["hash"] = f"sha256:{found.pop('sha256')}"
        ends = {end: index(found[end]) for end in ("start", "stop")}
        return Piece(**found | {"box": box} | ends)

    return {
        kind: {
            name: Tensor(t["dtype"], tuple(map(index, t["shape"])), tuple(map(piece, t["pieces"])))
            for name, t in tensors.items()
        }
        for kind, tensors in kinds.items()
    }


def _check(manifest: Manifest) -> None:
    """Refuse numbers and names that make no sense, and arrays that are not covered once."""
    value, good = manifest.loss_scale or (1.0, 0)
    numbers = [manifest.steps, good, *manifest.mesh.values()]
    if not all(type(n) is int and n >= 0 for n in numbers) or not float(value) > 0:
        raise ValueError("a number in it is none, or below zero")
    for what, tensor, piece in manifest.pieces():
        if not all(isinstance(text, str) for text in (piece.file, piece.key, piece.hash)):
            raise ValueError(f"a name of {what} is no text")
        kind_of(piece.hash)
        if os.path.basename(piece.file) != piece.file or piece.file.startswith("."):
            raise ValueError(f"{piece.file!r} is no name of a file")
        inside = all(0 <= a <= b <= n for (a, b), n in zip(piece.box, tensor.shape, strict=True))
        if not inside or not 0 <= piece.start <= piece.stop <= piece.size:
            raise ValueError(f"a piece of {what} is not inside of it")
    for kind, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            if tensor.dtype != "bfloat16" and np.dtype(tensor.dtype).name != tensor.dtype:
                raise ValueError(f"{tensor.dtype!r} of {name} in {kind} is no type")
            if not _covered(tensor):
                raise ValueError(f"the pieces of {name} in {kind} are not the whole of it")


def _covered(tensor: Tensor) -> bool:
    """Tell whether pieces are every element once: runs fill boxes, boxes fill the array."""
    runs: dict[Box, list[Piece]] = {}
    for piece in tensor.pieces:
        runs.setdefault(piece.box, []).append(piece)
    for pieces in runs.values():
        ends = [0, *(n for p in sorted(pieces, key=_start) for n in (p.start, p.stop))]
        ends.append(pieces[0].size)
        if any(a != b for a, b in zip(ends[::2], ends[1::2], strict=True)):
            return False
    boxes: Sequence[Box] = sorted(box for box in runs if all(a < b for a, b in box))
    total = sum(prod(b - a for a, b in box) for box in boxes)
    # sorted boxes that a mesh has made follow each other along one axis
    apart = all(any(a[1] <= b[0] for a, b in zip(x, y, strict=True)) for x, y in pairwise(boxes))
    return total == tensor.size and apart


def _start(piece: Piece) -> tuple[int, int]:
    return piece.start, piece.stop
