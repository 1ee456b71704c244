"""Numbers of 64 bits that stand for expressions: those of two differ, but for a case in 2^60."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def mixed(x: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit numbers (the finalizer of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def pair(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the form of one operation."""
    return mixed(left * np.uint64(3) + mixed(right))


def form(forms: np.ndarray, tree: bool) -> np.ndarray:
    """Return the form of a fold of ``[sources, units]`` forms."""
    level = list(forms)
    if tree and len(level) > 3:  # up to three, the tree is a line
        extra = len(level) - (1 << (len(level).bit_length() - 1))
        pairs = [pair(level[2 * i], level[2 * i + 1]) for i in range(extra)]
        level = pairs + level[2 * extra :]
        while len(level) > 1:
            level = [pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
        return level[0]
    result = level[0]
    for each in level[1:]:
        result = pair(result, each)
    return result


def lines(leaves: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the forms of the first 1, 2, ... of ``[ranks, chunks]`` inputs, folded in a line.

    Each comes with the numbers of inputs less one, as a slice.
    """
    result = leaves[0]
    yield slice(0, 1), result[None]
    for k in range(1, len(leaves)):
        result = pair(result, leaves[k])
        yield slice(k, k + 1), result[None]


def trees(leaves: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the same for the in-order balanced tree.

    The tree of p + e inputs has e pairs before its p - e single ones. On each level all nodes but
    the one at that border are windows: of 2 d inputs each before it, of d behind it.
    """
    n = len(leaves)
    windows, d = [leaves], 1  # of d inputs, by the first of them
    while 2 * d <= n:
        windows.append(pair(windows[-1][: n - 2 * d + 1], windows[-1][d : n - d + 1]))
        d *= 2
    for level in range(len(windows)):
        p = 1 << level
        e = np.arange(min(p, n + 1 - p))
        result = leaves[2 * e]  # where e is 0, the first input
        for below in range(level):
            d, border = 1 << below, e >> below
            odd = border & 1 == 1
            left = windows[below + 1][np.where(odd, 2 * (border - 1) * d, 0)]
            right = windows[below][np.where(odd, 0, e + (border + 1) * d)]
            odd = odd[:, None]
            result = pair(np.where(odd, left, result), np.where(odd, result, right))
        yield slice(p - 1, p - 1 + len(e)), result
