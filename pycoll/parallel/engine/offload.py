"""What layers keep for the backward pass, elsewhere from soon after it is made until it is needed.

Elsewhere is a file, and the memory of the host for arrays of a device.

Arrays come back with the strides that they had, so that whatever reads them does the same as
before, to the bit.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pycoll.parallel.channels import Ledger
from pycoll.parallel.engine.options import Options
from pycoll.parallel.state.host_memory import HostMemory
from pycoll.parallel.state.storage import Storage

LEAST_BYTES = 4096
"""Smaller arrays stay in memory."""
LAYERS = 2
"""Layers whose arrays are being written at a time; before there are more, the oldest is waited for.
"""
_WIDEST = 4  # times the bytes of a view, what is stored for it has at most


class Kept:
    """Keeps everything in memory."""

    def problems(self) -> list[str]:
        """Return what could not be stored since the last call."""
        return []

    def put(self, saved: Any) -> Any:
        """Return what stands for something that a layer has kept."""
        return saved

    def fetch(self, packed: Any) -> None:
        """Start to bring it into memory."""

    def take(self, packed: Any) -> Any:
        """Return it."""
        return packed


class Offloaded(Kept):
    """Keeps arrays elsewhere: those in tuples, lists and dicts, each part of memory once.

    What cannot be stored stays in memory, and is a problem.
    """

    def __init__(self, storage: Any, ledger: Ledger) -> None:
        """Keep them in a `Storage` or `HostMemory`, counted in a ledger."""
        self._storage, self._ledger = storage, ledger
        self._blocks: weakref.WeakValueDictionary[Any, _Block] = weakref.WeakValueDictionary()
        self._writing: deque[list[Any]] = deque()
        self._problems: list[str] = []

    def problems(self) -> list[str]:
        """Return what could not be stored since the last call; one is enough."""
        found = self._problems[:1]
        self._problems.clear()
        return found

    def put(self, saved: Any) -> Any:
        """Start to write the arrays of a layer; they must stay as they are."""
        blocks: dict[int, _Block] = {}
        writes: list[Any] = []

        def leaf(x: Any) -> Any:
            place = self._place(x)
            block = None if place is None else self._block(place, writes)
            if block is None:
                return x
            blocks[id(block)] = block
            offset = self._storage.address(x) - self._storage.address(place.memory)
            return _View(block, offset, x.shape, x.strides, x.dtype)

        tree = _mapped(saved, leaf)
        self._writing.append(writes)
        while len(self._writing) > LAYERS:
            for write in self._writing.popleft():
                write.result()
        return _Packed(tree, list(blocks.values()), {}) if blocks else saved

    def _place(self, x: Any) -> _Place | None:
        """Return the memory to store for an array; None: it stays where it is."""
        owns = self._storage.owns
        if not owns(x) or x.nbytes < LEAST_BYTES:
            return None
        owner = x.base if owns(x.base) else x
        if owner.nbytes <= _WIDEST * x.nbytes and _dense(owner):
            return _Place(owner, owner)
        return _Place(x, owner) if _dense(x) else None

    def _block(self, place: _Place, writes: list[Any]) -> _Block | None:
        """Return where an array's memory is stored; None if there is no room for it."""
        memory = place.memory
        key = self._storage.address(memory), memory.nbytes
        block = self._blocks.get(key)
        if block is not None and block.alive() is place.owner:
            return block
        try:
            block = _Block(self._storage, self._ledger, place, self._problems)
        except OSError as error:
            self._problems.append(_no_room(memory.nbytes, error))
            return None
        self._blocks[key] = block
        writes.append(self._storage.later(block.write, memory))
        return block

    def fetch(self, packed: Any) -> None:
        """Start to read what `put` has returned."""
        if isinstance(packed, _Packed):
            for block in packed.blocks:
                if block not in packed.found:
                    packed.found[block] = block.fetch()

    def take(self, packed: Any) -> Any:
        """Return what `put` was given.

        Raises:
            OSError: If it cannot be read.
        """
        if not isinstance(packed, _Packed):
            return packed
        self.fetch(packed)
        memory = {block: found() for block, found in packed.found.items()}
        packed.found.clear()

        def leaf(x: Any) -> Any:
            if not isinstance(x, _View):
                return x
            return self._storage.view(memory[x.block], x.offset, x)

        return _mapped(packed.tree, leaf)


Elsewhere = Storage | HostMemory | None


def keeping(options: Options, ledger: Ledger) -> tuple[Elsewhere, Kept]:
    """Return where options offload to, if anything, and what keeps activations.

    Raises:
        OSError: If the file cannot be made.
    """
    if options.offload == "none":
        return None, Kept()
    storage = HostMemory() if options.device == "cuda" else Storage(options.offload_dir)
    return storage, Offloaded(storage, ledger) if options.offloads("activations") else Kept()


class _Place(NamedTuple):
    """The memory of an array: a dense array, and whose memory it is."""

    memory: Any
    owner: Any


class _View(NamedTuple):
    """An array in a block."""

    block: _Block
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


@dataclass
class _Packed:
    """What stands for something that a layer has kept.

    Attributes:
        tree: The same with `_View` in place of arrays.
        blocks: The blocks of these.
        found: Functions that return their bytes, once they are read.
    """

    tree: Any
    blocks: list[_Block]
    found: dict[_Block, Callable[[], Any]]


class _Block:
    """A part of memory that is stored once, however many arrays lie in it."""

    def __init__(self, storage: Any, ledger: Ledger, place: _Place, problems: list[str]) -> None:
        self.alive = weakref.ref(place.owner)
        self._storage, self._nbytes, self._problems = storage, place.memory.nbytes, problems
        self._start = storage.reserve(self._nbytes)
        self._here: Callable[[], Any] = lambda: None
        ledger.stored["activation"] += self._nbytes
        weakref.finalize(self, _free, storage, ledger, self._start, self._nbytes).atexit = False

    def write(self, memory: Any) -> None:
        """Write all of it; what cannot be written stays in memory."""
        data = _bytes(memory)
        try:
            self._storage.write(data, self._start)
        except OSError as error:
            self._here = lambda: data
            self._problems.append(_no_room(self._nbytes, error))

    def fetch(self) -> Callable[[], Any]:
        """Start to read it, unless it is in memory; return what gives its bytes."""
        return self._storage.later(self._read).result

    def _read(self) -> Any:
        """Return its bytes, in the thread: after what was to be written before."""
        if (here := self._here()) is not None:
            return here
        data = self._storage.empty(self._nbytes)
        self._storage.read(data, self._start)
        self._here = weakref.ref(data)
        return data


def _no_room(nbytes: int, error: OSError) -> str:
    return f"no room for {nbytes} bytes of an activation: {error}"


def _free(storage: Any, ledger: Ledger, start: Any, nbytes: int) -> None:
    ledger.stored["activation"] -= nbytes
    storage.release(start, nbytes)


def _mapped(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return tuples, lists and dicts with a function of what is in them."""
    kind = type(tree)
    if kind in (tuple, list):
        return kind(_mapped(part, leaf) for part in tree)
    if kind is dict:
        return {key: _mapped(part, leaf) for key, part in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields") and kind is not _View:
        return kind(*(_mapped(part, leaf) for part in tree))
    return leaf(tree)


def _order(x: Any) -> Sequence[int]:
    return sorted(range(x.ndim), key=lambda axis: (-x.strides[axis], -x.shape[axis]))


def _dense(x: Any) -> bool:
    """Tell whether an array has all of its memory, in whatever order of axes."""
    return bool(x.transpose(_order(x)).flags.c_contiguous)


def _bytes(x: Any) -> Any:
    """Return the memory of a dense array."""
    return x.transpose(_order(x)).reshape(-1).view(np.uint8)
