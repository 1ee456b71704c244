"""Parts of memory that arrays lie in: what of them is in memory, and what is stored elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pycoll.parallel.channels import Ledger


class Place(NamedTuple):
    """The memory of an array, and whose it is; whether it is in one piece, and can go away."""

    memory: Any
    owner: Any
    dense: bool
    goes: bool


@dataclass(frozen=True)
class View:
    """An array in a block.

    Attributes:
        block: The block.
        offset: Bytes from its start.
        shape: Of the array.
        strides: Of the array, in bytes.
        dtype: Of the array.
        wrapped: Whether it is to be wrapped.
    """

    block: Block
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    wrapped: bool


@dataclass
class Packed:
    """What stands for something that a layer has kept.

    Attributes:
        tree: The same with `View` in place of arrays that go away.
        blocks: The blocks of these.
        held: What it has in memory.
    """

    tree: Any
    blocks: dict[Block, None] = field(default_factory=dict)
    held: dict[Block, Memory] = field(default_factory=dict)


class Memory:
    """Bytes in memory, which count while somebody has this; what works on them is waited for.

    Attributes:
        data: The bytes, or the array if it is not in one piece.
        coming: What reads them, if they are read.
        busy: What works on them.
    """

    def __init__(self, data: Any, nbytes: int, ledger: Ledger) -> None:
        """Count them in a ledger."""
        self.data: Any = data
        self.coming: Any = None
        self.busy: list[Any] = []
        ledger.hold("activation", nbytes)
        weakref.finalize(self, _gone, ledger, nbytes, self.busy).atexit = False


def _gone(ledger: Ledger, nbytes: int, busy: list[Any]) -> None:
    for each in busy:
        with suppress(OSError):  # whoever wanted the bytes has heard of it
            each.result()
    ledger.hold("activation", -nbytes)


class Block:
    """A part of memory that is stored once, however many arrays lie in it.

    Attributes:
        owner: Returns the array whose memory it is, while that exists.
        nbytes: Its size.
        start: Where it is stored; None: it stays in memory.
        here: Returns its memory, while somebody has that.
        memory: The same while it is written, and if it cannot be.
        written: What writes it, and tells whether it could.
        taken: Whether a layer was given it again.
    """

    def __init__(self, place: Place, start: Any) -> None:
        """Stand for the memory of an array."""
        self.owner: Callable[[], Any] = weakref.ref(place.owner)
        self.nbytes: int = place.memory.nbytes
        self.start: Any = start
        self.here: Callable[[], Memory | None] = lambda: None
        self.memory: Memory | None = None
        self.written: Any = None
        self.taken: bool = False

    def count(self, storage: Any, ledger: Ledger) -> None:
        """Count it as stored until nobody has it any more; then its room is free."""
        ledger.store("activation", self.nbytes)
        weakref.finalize(self, _free, storage, ledger, self.start, self.nbytes).atexit = False


def _free(storage: Any, ledger: Ledger, start: Any, nbytes: int) -> None:
    ledger.store("activation", -nbytes)
    storage.release(start, nbytes)


def mapped(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return tuples, lists and dicts with a function of what is in them."""
    kind = type(tree)
    if kind in (tuple, list):
        return kind(mapped(part, leaf) for part in tree)
    if kind is dict:
        return {key: mapped(part, leaf) for key, part in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*(mapped(part, leaf) for part in tree))
    return leaf(tree)


def _order(x: Any) -> Sequence[int]:
    return sorted(range(x.ndim), key=lambda axis: (-x.strides[axis], -x.shape[axis]))


def dense(x: Any) -> bool:
    """Tell whether an array has all of its memory, in whatever order of axes."""
    return bool(x.transpose(_order(x)).flags.c_contiguous)


def as_bytes(x: Any) -> Any:
    """Return the memory of a dense array."""
    return x.transpose(_order(x)).reshape(-1).view(np.uint8)
