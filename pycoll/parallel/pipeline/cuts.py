"""Where a model is cut into the chunks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pycoll.errors import ArgumentError

Cut = str | Sequence[str]
"""``"parameters"``, ``"time"``, or names of layers; see `pycoll.parallel.Pipeline`."""


def checked(cut: Cut | None) -> Cut:
    """Return a cut, that by parameters for None.

    Raises:
        ArgumentError: For a word that says nothing.
    """
    if isinstance(cut, str) and cut not in ("parameters", "time"):
        raise ArgumentError(f"cut={cut!r}; accepted: parameters, time, a list of names of layers")
    return "parameters" if cut is None else cut


def cut_units(names: Sequence[str], sizes: Sequence[int], chunks: int, cut: Cut) -> list[int]:
    """Return the first unit of each chunk.

    Args:
        names: Names of the units.
        sizes: Parameters, or time, of each unit.
        chunks: Number of chunks.
        cut: Names of the units that begin the second and later chunks; a word: the largest chunk
            is as small as it can be.

    Raises:
        ArgumentError: If there are too few units, or a name is not known or out of order.
    """
    if len(names) < chunks:
        raise ArgumentError(
            f"a pipeline of {chunks} chunks needs at least {chunks} layers; the model has "
            f"{len(names)}: {', '.join(names)}"
        )
    if isinstance(cut, str):
        return _balanced([size + 1 for size in sizes], chunks)
    unknown = [name for name in cut if name not in names]
    starts = [0, *(names.index(name) for name in cut if name in names)]
    if unknown or len(starts) != chunks or sorted(set(starts)) != starts:
        raise ArgumentError(
            f"cut={list(cut)!r}; expected the names of {chunks - 1} layers in their order, each "
            f"the first of a chunk, out of {', '.join(names[1:])}"
        )
    return starts


def _balanced(sizes: Sequence[int], chunks: int) -> list[int]:
    """Return starts of runs whose largest sum is least, by dynamic programming."""
    total = np.concatenate([[0], np.cumsum(sizes)])
    n = len(sizes)
    best = np.full((chunks + 1, n + 1), np.inf)
    start = np.zeros((chunks + 1, n + 1), int)
    best[0, 0] = 0
    for k in range(1, chunks + 1):
        for end in range(k, n - chunks + k + 1):
            worst = np.maximum(best[k - 1, k - 1 : end], total[end] - total[k - 1 : end])
            first = int(np.argmin(worst))
            best[k, end], start[k, end] = worst[first], first + k - 1
    starts, end = [], n
    for k in range(chunks, 0, -1):
        end = int(start[k, end])
        starts.append(end)
    return starts[::-1]
