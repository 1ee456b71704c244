"""Where the chunks of a call lie if they are not all of one size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pycoll.schedule.language.collectives import OWN, Collective


@dataclass(frozen=True)
class Extents:
    """Offsets and lengths of every chunk on every rank, in elements, for the v-variants.

    Each is a ``[world_size, chunks]`` array of uint64.
    """

    in_offset: np.ndarray
    in_length: np.ndarray
    out_offset: np.ndarray
    out_length: np.ndarray


def blocks_in_chunks(count: int, n: int, chunks: int, promise: Collective) -> Extents | None:
    """Return where chunks lie if the blocks of ranks are not multiples of their chunks, or None."""
    owned = promise.transposes or OWN in (promise.in_layout, promise.out_layout)
    share, block = chunks // n, count // n
    if not owned or share < 2 or block % share == 0:
        return None
    return blocks_apart(count, n, chunks, promise, np.arange(n) * block)


def blocks_apart(
    count: int, n: int, chunks: int, promise: Collective, offsets: np.ndarray
) -> Extents:
    """Return where chunks lie if the blocks of the array that has all of them lie anywhere.

    Args:
        count: Elements of all blocks together.
        n: Number of ranks.
        chunks: Chunks of the plan, as many for each rank.
        promise: What the collective promises.
        offsets: First element of the block of each rank in the array that has those of all.
    """
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

    return Extents(*places(promise.in_layout), *places(promise.out_layout))
