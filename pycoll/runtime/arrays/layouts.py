"""Layouts: shapes of results, offsets of chunks, and arrays that the engine finds elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pycoll import _C
from pycoll.errors import ArgumentError
from pycoll.schedule.language.collectives import OWN, Collective
from pycoll.types import Kind

Copy = tuple[int, int, int]  # to, from, bytes


class RegisteredPart(NamedTuple):
    """Where the engine finds a registered array, or a part of one."""

    registration: _C.Registration  # the whole array
    pointer: int  # address in the caller's memory
    nbytes: int  # size of the part
    address: int  # address of the same part in the heap

    def gather(self) -> None:
        """Bring the heap up to date."""
        self.registration.gather(self.pointer, self.nbytes)

    def scatter(self) -> None:
        """Bring the caller's memory up to date."""
        self.registration.scatter(self.pointer, self.nbytes)

    def copies_in(self) -> list[Copy]:
        """Return the copies that bring the heap up to date."""
        edges = self.registration.edges(self.pointer, self.nbytes)
        return [(heap, user, nbytes) for user, heap, nbytes in edges]

    def copies_out(self) -> list[Copy]:
        """Return the copies that bring the caller's memory up to date."""
        return self.registration.edges(self.pointer, self.nbytes)


class Detour(NamedTuple):
    """Symmetric memory in which an array is made that lies elsewhere."""

    made: np.ndarray  # the array in symmetric memory
    wanted: np.ndarray  # where it belongs

    @property
    def address(self) -> int:
        """Where the engine writes."""
        return self.made.ctypes.data

    def copies_in(self) -> list[Copy]:
        """Return none: what is there is overwritten."""
        return []

    def copies_out(self) -> list[Copy]:
        """Return the copy that puts the result where it belongs."""
        return [(self.wanted.ctypes.data, self.made.ctypes.data, self.made.nbytes)]


Shape = tuple[int, ...]


def _same(shape: Shape, n: int) -> Shape:
    return shape


def _join(shape: Shape, n: int) -> Shape:
    return (n * shape[0], *shape[1:]) if shape else (n,)


def _split(shape: Shape, n: int) -> Shape:
    if not shape or shape[0] % n:
        raise ArgumentError(
            f"x has shape {shape}; its first dimension must be a multiple of the world size {n}; "
            "reduce_scatter_v, scatter_v and all_to_all_v take blocks of different sizes"
        )
    return (shape[0] // n, *shape[1:])


def _blocks(shape: Shape, n: int) -> Shape:
    _split(shape, n)
    return shape


def stacked_shape(kind: Kind, shape: Shape, n: int) -> Shape | None:
    """Return the other shape in which a result is taken, if there is one.

    What ranks contribute may be stacked along a new dimension, and a block may be without the
    dimension along which blocks are stacked.
    """
    if kind in (Kind.ALL_GATHER, Kind.GATHER):
        return n, *shape
    if kind in (Kind.SCATTER, Kind.REDUCE_SCATTER) and len(shape) > 1 and shape[0] == n:
        return shape[1:]
    return None


RESULT_SHAPE: dict[Kind, Callable[[Shape, int], Shape]] = {
    Kind.ALL_REDUCE: _same,
    Kind.REDUCE_SCATTER: _split,
    Kind.ALL_GATHER: _join,
    Kind.BROADCAST: _same,
    Kind.REDUCE: _same,
    Kind.GATHER: _join,
    Kind.SCATTER: _split,
    Kind.ALL_TO_ALL: _blocks,
    Kind.BARRIER: _same,
    Kind.SCAN: _same,
    Kind.EXSCAN: _same,
}


@dataclass(frozen=True)
class ChunkLayout:
    """Offsets and lengths of every chunk on every rank, in elements, for the v-variants.

    Each is a ``[world_size, chunks]`` array of uint64.
    """

    in_offset: np.ndarray
    in_length: np.ndarray
    out_offset: np.ndarray
    out_length: np.ndarray


def blocks_in_chunks(count: int, n: int, chunks: int, promise: Collective) -> ChunkLayout | None:
    """Return where chunks lie if the blocks of ranks are not multiples of their chunks, or None."""
    owned = promise.transposes or OWN in (promise.in_layout, promise.out_layout)
    share, block = chunks // n, count // n
    if not owned or share < 2 or block % share == 0:
        return None
    return blocks_apart(count, n, chunks, promise, np.arange(n) * block)


def blocks_apart(
    count: int, n: int, chunks: int, promise: Collective, offsets: np.ndarray
) -> ChunkLayout:
    """Return where chunks lie if the blocks of the array that has all of them lie anywhere."""
    share, block = chunks // n, count // n
    size = -(-block // share)
    low = np.minimum(np.arange(share) * size, block)
    length = np.tile(np.minimum(low + size, block) - low, n)
    inside = np.tile(low, n)  # of the block
    full = inside + np.repeat(offsets, share)

    holder = np.repeat(np.arange(n), share)  # by chunk, where arrays have one block each

    def rows(row: np.ndarray) -> np.ndarray:
        return np.tile(row.astype(np.uint64), (n, 1))

    def places(of: str) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and lengths; of chunks that a rank does not hold there is nothing."""
        if of != OWN:
            return rows(full), rows(length)
        return rows(inside), rows(length) * (holder == np.arange(n)[:, None])

    return ChunkLayout(*places(promise.in_layout), *places(promise.out_layout))
