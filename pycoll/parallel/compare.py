"""Compare texts, settings and values over the ranks of a channel; errors name the ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll.errors import MismatchError
from pycoll.parallel.channels import Channel

VOTE_WORDS = 6
_PART = (1 << 21) - 1  # 4,096 squares of this have a sum below 2**63


def check_same(lines: Sequence[str], what: str, world: Channel) -> None:
    """Compare lines of text, about `what` in the plural, over all ranks; a collective.

    Raises:
        MismatchError: On every rank, with the first line that differs and the ranks.
    """
    text = "\n".join(lines)
    table = world.gather_rows(digest(text.encode()), "check")
    if (table == table[0]).all():
        return
    if each := _difference(gather_texts(text, world), world.ranks):
        raise MismatchError(
            f"ranks have different {what}: {each}; they have to be the same everywhere"
        )


def refuse_first(problem: str, world: Channel) -> None:
    """Raise the first problem of any rank on all of them; a collective.

    Raises:
        MismatchError: On every rank, with the same text.
    """
    if found := next(filter(None, gather_texts(problem, world)), ""):
        raise MismatchError(found)


def _difference(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Return the first line in which texts differ, and which of `ranks` have what."""
    views = [text.split("\n") for text in texts]
    for i in range(max(map(len, views))):
        seen = [view[i] if i < len(view) else "(nothing)" for view in views]
        if len(set(seen)) > 1:
            lines = dict.fromkeys(seen)
            return "; ".join(f"{ranks_with(seen, line, ranks)}: {line}" for line in lines)
    return ""


def vote(value: str) -> np.ndarray:
    """Return `VOTE_WORDS` integers; their sums over ranks show whether all have the same value."""
    parts = np.frombuffer(digest(value.encode(), 8), np.uint64) >> np.array([0, 21, 42], np.uint64)
    parts = (parts & np.uint64(_PART)).astype(np.int64)
    return np.concatenate([parts, parts * parts])


def check_unanimous(sums: np.ndarray, value: str, channel: Channel) -> None:
    """Compare a text with those of all ranks, given the sums of their votes.

    Votes are equal if the mean of their squares is the square of their mean.

    Raises:
        MismatchError: On every rank, with the first line that differs and the ranks.
    """
    total, half = sums.tolist(), VOTE_WORDS // 2
    n, pairs = channel.world_size, zip(total[:half], total[half:], strict=True)
    if all(n * square == x * x for x, square in pairs):
        return
    each = _difference(gather_texts(value, channel), channel.ranks)
    raise MismatchError(f"the step was not taken: ranks have different settings: {each}")


def gather_texts(text: str, channel: Channel) -> list[str]:
    """Return the texts of all ranks; a collective."""
    data = f"{text}\0".encode(errors="backslashreplace")  # a path may have any bytes
    raw = np.frombuffer(data, np.uint8)
    return bytes(channel.comm.all_gather_v(raw)).decode().split("\0")[:-1]


def gather_problems(text: str, channel: Channel) -> str:
    """Return ``"rank 1 has ...; ranks 2, 3 have ..."`` for ranks with a text; a collective."""
    found = Counter(texts := gather_texts(text, channel))
    return "; ".join(
        f"{who_has(texts, text, channel.ranks)} {'have' if count > 1 else 'has'} {text}"
        for text, count in found.items()
        if text
    )


def who_has(seen: Sequence[Any], value: Any, ranks: Sequence[int]) -> str:
    """Name the ranks that have a value, as `ranks_with`, or ``"all ranks"``."""
    alike = len(seen) > 1 and all(other == value for other in seen)
    return "all ranks" if alike else ranks_with(seen, value, ranks)


def ranks_with(seen: Sequence[Any], value: Any, ranks: Sequence[int]) -> str:
    """Name those of `ranks` that have a value: ``"rank 2"``, ``"ranks 0, 1, 3"``."""
    return name_ranks([rank for rank, other in zip(ranks, seen, strict=True) if other == value])


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``"rank 2"``, or ``"ranks 0, 1, 3"``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def digest(data: Any, size: int = 16) -> np.ndarray:
    """Return `size` bytes that stand for a buffer of bytes, or a contiguous array."""
    raw = data if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
    return np.frombuffer(hashlib.blake2b(raw, digest_size=size).digest(), np.uint8)
