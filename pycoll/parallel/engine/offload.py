"""What layers keep for the backward pass, elsewhere from soon after it is made until it is needed.

Elsewhere is a file, and the memory of the host for arrays of a device.

Arrays come back with the strides that they had, so that whatever reads them does the same as
before, to the bit. What is in memory is decided by the order of the calls, and by no clock.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from pycoll.parallel.arrays import kind_of_wrapped, shared_array
from pycoll.parallel.channels import Ledger
from pycoll.parallel.engine.blocks import (
    Block,
    Memory,
    Packed,
    Place,
    View,
    as_bytes,
    dense,
    mapped,
)
from pycoll.parallel.engine.options import Options
from pycoll.parallel.state.host_memory import HostMemory
from pycoll.parallel.state.storage import Storage

Wrap = Callable[[Any], Any]
"""See `Options.wrap`."""
LEAST_BYTES = 4096
"""Smaller arrays stay in memory."""
LAYERS = 2
"""Layers whose arrays are being written at a time; before there are more, the oldest is waited for.
They are in memory until then, or until nobody needs them.
"""
_WIDEST = 4  # times the bytes of a view, what is stored for it has at most


class Kept:
    """Keeps everything in memory, and counts none of it."""

    def problems(self) -> list[str]:
        """Return what could not be stored since the last call."""
        return []

    def put(self, saved: Any) -> Any:
        """Return what stands for something that a layer has kept."""
        return saved

    def stay(self, saved: Any) -> Any:
        """Return what stands for something that is needed too soon to go anywhere."""
        return saved

    def fetch(self, packed: Any) -> None:
        """Start to bring it into memory."""

    def take(self, packed: Any) -> Any:
        """Return it."""
        return packed


class Offloaded(Kept):
    """Keeps arrays elsewhere: those in tuples, lists and dicts, each part of memory once.

    They are the storage's own, or what `wrap` makes of these.

    In memory are those of the last `LAYERS` calls of `put`, those that are fetched, those that
    stay, and those that are too small. They are in the ledger as ``activation`` until what stands
    for them is gone. What cannot be stored stays, and is a problem.
    """

    def __init__(self, storage: Any, ledger: Ledger, wrap: Wrap = Options.wrap) -> None:
        """Keep them in a `Storage` or `HostMemory`, counted in a ledger."""
        self._storage, self._ledger, self._wrap = storage, ledger, wrap
        self._wrapped = kind_of_wrapped(wrap)
        self._blocks: weakref.WeakValueDictionary[Any, Block] = weakref.WeakValueDictionary()
        self._writing: deque[list[weakref.ref[Block]]] = deque()
        self._problems: list[str] = []

    def problems(self) -> list[str]:
        """Return what could not be stored since the last call; one is enough."""
        found = self._problems[:1]
        self._problems.clear()
        return found

    def put(self, saved: Any) -> Any:
        """Start to write the arrays of a layer; they must stay as they are."""
        fresh: list[Block] = []
        packed = self._packed(saved, fresh)
        self._writing.append([weakref.ref(block) for block in fresh])
        while len(self._writing) > LAYERS:
            for each in self._writing.popleft():
                if (block := each()) is not None and block.written.result():
                    block.memory = None
        return packed

    def stay(self, saved: Any) -> Any:
        """Count the arrays of a layer, which stay in memory."""
        return self._packed(saved, None)

    def _packed(self, saved: Any, fresh: list[Block] | None) -> Any:
        """Return what stands for the arrays of a layer; blocks that are new become `fresh`.

        With None, nothing goes away.
        """
        packed = Packed(None)

        def leaf(x: Any) -> Any:
            own = x if self._storage.owns(x) else shared_array(x, self._wrapped)
            if own is None or (place := self._place(own)) is None:
                return x
            block = self._block(place, fresh)
            if fresh is None or block.start is None:
                packed.held[block] = self._memory(block, place)
                return x
            packed.blocks[block] = None
            offset = self._storage.address(own) - self._storage.address(place.memory)
            return View(block, offset, own.shape, own.strides, own.dtype, own is not x)

        packed.tree = mapped(saved, leaf)
        return packed if packed.blocks or packed.held else saved

    def _place(self, x: Any) -> Place | None:
        """Return the memory to count for an array; None: it has none."""
        owns = self._storage.owns
        if not x.nbytes:
            return None
        owner, large = x.base if owns(x.base) else x, x.nbytes >= LEAST_BYTES
        if owner.nbytes <= _WIDEST * x.nbytes and dense(owner):
            return Place(owner, owner, True, large)
        return Place(x, owner, whole := dense(x), whole and large)

    def _block(self, place: Place, fresh: list[Block] | None) -> Block:
        """Return the block of some memory, one that is new if it goes away now.

        What a layer has been given again, it may have changed.
        """
        memory, goes = place.memory, place.goes and fresh is not None
        key = self._storage.address(memory), memory.nbytes
        known = self._blocks.get(key)
        if known is not None and not self._is(known, place):
            known = None
        if known is not None:
            old = known.taken and known.start is not None and fresh is not None
            if not old and not (goes and known.start is None):
                return known
        block = Block(place, self._room(memory.nbytes) if goes else None)
        if known is not None:
            block.here = known.here
        self._blocks[key] = block
        if fresh is not None and block.start is not None:
            self._write(block, place)
            fresh.append(block)
        return block

    def _is(self, block: Block, place: Place) -> bool:
        """Tell whether a block is some memory, and not what was at that address before."""
        if block.owner() is place.owner:
            return True
        memory, address = block.here(), self._storage.address
        return memory is not None and address(memory.data) == address(place.memory)

    def _room(self, nbytes: int) -> Any:
        """Return where so many bytes are to be stored; None if there is no room."""
        try:
            return self._storage.reserve(nbytes)
        except OSError as error:
            self._problems.append(_no_room(nbytes, error))
            return None

    def _write(self, block: Block, place: Place) -> None:
        """Start to write a block."""
        block.count(self._storage, self._ledger)
        block.memory = memory = self._memory(block, place)
        block.written = self._storage.later(self._written, memory.data, block.start)
        memory.busy.append(block.written)

    def _written(self, data: Any, start: Any) -> bool:
        """Write all of a block; tell whether there was room."""
        try:
            self._storage.write(data, start)
        except OSError as error:
            self._problems.append(_no_room(data.nbytes, error))
            return False
        return True

    def _memory(self, block: Block, place: Place) -> Memory:
        """Return the memory of a block, counted once."""
        if (memory := block.here()) is None:
            data = as_bytes(place.memory) if place.dense else place.memory
            memory = Memory(data, block.nbytes, self._ledger)
            block.here = weakref.ref(memory)
        return memory

    def fetch(self, packed: Any) -> None:
        """Start to read what `put` has returned, unless it is still in memory."""
        if isinstance(packed, Packed):
            for block in packed.blocks:
                if block not in packed.held:
                    packed.held[block] = block.here() or self._read(block)

    def _read(self, block: Block) -> Memory:
        """Start to read a block, after what was to be written before."""
        data = self._storage.empty(block.nbytes)
        memory = Memory(data, block.nbytes, self._ledger)
        memory.coming = self._storage.later(self._storage.read, data, block.start)
        memory.busy.append(memory.coming)
        block.here, block.owner = weakref.ref(memory), weakref.ref(data)
        self._blocks[self._storage.address(data), block.nbytes] = block
        return memory

    def take(self, packed: Any) -> Any:
        """Return what `put` or `stay` was given; it is in memory until `packed` is gone.

        Raises:
            OSError: If it cannot be read.
        """
        if not isinstance(packed, Packed):
            return packed
        self.fetch(packed)
        for block, memory in packed.held.items():
            block.taken = True
            if memory.coming is not None:
                memory.coming.result()

        def leaf(x: Any) -> Any:
            if not isinstance(x, View):
                return x
            view = self._storage.view(packed.held[x.block].data, x.offset, x)
            return self._wrap(view) if x.wrapped else view

        return mapped(packed.tree, leaf)


Elsewhere = Storage | HostMemory | None


def keeping(options: Options, ledger: Ledger) -> tuple[Elsewhere, Kept]:
    """Return where options offload to, if anything, and what keeps activations.

    Raises:
        OSError: If the file cannot be made.
    """
    if options.offload == "none":
        return None, Kept()
    storage = HostMemory() if options.device == "cuda" else Storage(options.offload_dir)
    if not options.offloads("activations"):
        return storage, Kept()
    return storage, Offloaded(storage, ledger, options.wrap)


def _no_room(nbytes: int, error: OSError) -> str:
    return f"no room for {nbytes} bytes of an activation: {error}"
