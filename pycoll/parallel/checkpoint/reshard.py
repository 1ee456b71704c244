"""Checkpoints made by one process: other files for the same arrays, and arrays from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.checkpoint.folder import (
    alone,
    begin,
    candidates,
    discard,
    partial_path,
    whole_path,
)
from pycoll.parallel.checkpoint.manifest import Manifest
from pycoll.parallel.checkpoint.reader import Reader
from pycoll.parallel.checkpoint.writer import as_lists, finish, write_file
from pycoll.parallel.settings import check_number
from pycoll.parallel.state.parts import Part


def reshard(source: str | os.PathLike[str], path: str | os.PathLike[str], files: int = 1) -> str:
    """Write the newest checkpoint again, each array in one piece; return the new one's path.

    What hooks had not sent, which fits one mesh only, is left out.

    Args:
        source: A checkpoint, or a folder of them.
        path: Folder of checkpoints, which gets a new one.
        files: Number of files, of nearly equal size.

    Raises:
        ArgumentError: If there is no checkpoint, it is damaged, or no other one can be written.
    """
    check_number("files", files, "[1, inf)", whole=True)
    with Reader(candidates(os.fspath(source))[0]) as reader:
        reader.verify()
        groups: list[list[tuple[str, str]]] = [[] for _ in range(files)]
        sizes = [0] * files
        for kind, name, nbytes in sorted(_arrays(reader.manifest), key=lambda a: -a[2]):
            least = sizes.index(min(sizes))
            groups[least].append((kind, name))
            sizes[least] += nbytes
        chunks = ((whole(*key, reader.whole(*key)) for key in group) for group in groups)
        return write(path, chunks, reader.manifest)


def _arrays(manifest: Manifest) -> Iterator[tuple[str, str, int]]:
    for kind, tensors in manifest.tensors.items():
        if not kind.startswith("hook of "):
            for name, tensor in tensors.items():
                yield kind, name, tensor.size * np.dtype(tensor.dtype).itemsize


def whole(kind: str, name: str, array: np.ndarray) -> Part:
    """Return an array as the part that is all of it."""
    box = tuple((0, count) for count in array.shape)
    return Part(kind, name, array.shape, box, 0, array.size, array.reshape(-1))


def write(path: str | os.PathLike[str], chunks: Iterable[Iterable[Part]], state: Manifest) -> str:
    """Write a checkpoint, a file for each chunk, with the counters of `state`; return its path."""
    path = os.fspath(path)
    try:
        with alone(path):
            return _write(path, chunks, state)
    except OSError as error:
        raise ArgumentError(f"no checkpoint was written in {path}: {error}") from error


def _write(path: str, chunks: Iterable[Iterable[Part]], state: Manifest) -> str:
    name, written = begin(path, state.steps), []
    try:
        for i, parts in enumerate(chunks):
            tensors = write_file(partial_path(path, name), f"part-{i:05d}.safetensors", parts)
            written.append(as_lists(tensors))
        if not any(written):
            raise ArgumentError("there is no array to write")
        finish(path, name, state, written)
    except BaseException:
        discard(path, name)
        raise
    return whole_path(path, name)
