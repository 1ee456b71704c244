"""What all ways of running a call on a device have in common: plans bound to numbers."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from ctypes import byref
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from pycoll.cuda.device.library import BEST, CallInfo, Spec, library
from pycoll.cuda.transports.program import Extent
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.layouts import ChunkLayout
from pycoll.runtime.calls.plans import (
    LAYOUT_OWN,
    LAYOUT_TABLE,
    CallSpec,
    binding_numbers,
    blocks_in_chunks,
    compile_plans,
)
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.plan import Plan
from pycoll.types import DType, ReduceOp

TIMEOUT_S = 60.0  # of calls of virtual ranks
_MAX_CALLS = 1024
_TABLES = ("in_offset", "in_length", "out_offset", "out_length")  # of `ChunkLayout` and `Spec`
_MOST_BYTES = 512 << 10  # of the whole vector of a call that can be sent in packets


def nanoseconds(limit: float) -> int:
    """Return a checked time limit, in seconds, as the device library takes it: 0 is its default."""
    return max(1, int(limit * 1e9))


def element_type(spec: CallSpec, other: DType | None = None) -> DType | None:
    """Return a call's element type; ``other`` for a type that can be moved, not reduced."""
    return DType(spec.dtype) if spec.dtype < len(DType) else other


def _numbers(spec: CallSpec, plan: Plan, world_size: int, number: int) -> dict[str, int]:
    chunks = plan.schedule.chunks
    if blocks_in_chunks(spec.count, world_size, chunks, COLLECTIVES[spec.collective]):
        raise ArgumentError(
            f"{spec.algorithm.name} divides blocks into {chunks // world_size} chunks: on a device "
            f"{spec.count // world_size} elements must be a multiple of that"
        )
    return binding_numbers(spec, world_size, chunks, plan.scales_in_fold, number)


def extent_of(spec: CallSpec, plan: Plan, world_size: int) -> Extent:
    """Return the sizes with which a plan of messages runs a call."""
    numbers = _numbers(spec, plan, world_size, 0)
    return Extent(
        count=spec.count,
        chunk=numbers["chunk"],
        itemsize=spec.itemsize,
        own_in=numbers["layout_in"] == LAYOUT_OWN,
        own_out=numbers["layout_out"] == LAYOUT_OWN,
        scale_n=numbers["scale_n"],
        scale_at_exit=bool(numbers["scale_at_exit"]),
    )


def device_spec(
    spec: CallSpec, plan: Plan, world_size: int, number: int, table: ChunkLayout | None = None
) -> tuple[Spec, tuple[Any, ...]]:
    """Return a plan with numbers as the device library takes it, and what has to stay alive."""
    numbers = _numbers(spec, plan, world_size, number)
    places: list[np.ndarray] = []
    if table is not None:
        numbers |= {"layout_in": LAYOUT_TABLE, "layout_out": LAYOUT_TABLE}
        places = [np.ascontiguousarray(getattr(table, name), np.uint64) for name in _TABLES]
    del numbers["check"]  # the descriptor has 15 bits of it
    code, operands = np.ascontiguousarray(plan.code), np.ascontiguousarray(plan.operands)
    numbers["dtype"] = int(element_type(spec, DType.UINT8))
    filled = Spec(
        code=code.ctypes.data,
        operands=operands.ctypes.data,
        ninstructions=len(code),
        noperands=len(operands),
        rank=plan.rank,
        chunks=plan.schedule.chunks,
        slots=plan.slots,
        rounds=plan.rounds,
        direct=plan.direct,
        **numbers,
    )
    for name, place in zip(_TABLES, places, strict=False):
        setattr(filled, name, place.ctypes.data)
    return filled, (code, operands, places)


def _key(spec: CallSpec, table: ChunkLayout | None) -> CallSpec | tuple[CallSpec, bytes]:
    """Return what a call is known by."""
    if table is None:
        return spec
    digest = hashlib.sha256()
    for name in _TABLES:
        digest.update(np.ascontiguousarray(getattr(table, name), np.uint64))
    return spec, digest.digest()


@lru_cache(maxsize=256)
def _compiled(spec: CallSpec, world_size: int, ranks: tuple[int, ...]) -> tuple[list[Plan], int]:
    """Compile plans once for all sizes and types; see `compile_plans`."""
    return compile_plans(spec, world_size, ranks)


class CallCache:
    """Calls that were made on a group of the device library, by what they do."""

    def __init__(self, group: int, world_size: int, ranks: Sequence[int]) -> None:
        """Begin with none.

        Args:
            group: The group.
            world_size: Its size.
            ranks: Ranks of this process.
        """
        self._group, self._n, self._ranks = group, world_size, ranks
        self._calls: OrderedDict[CallSpec | tuple[CallSpec, bytes], int] = OrderedDict()
        self._pinned: set[int] = set()

    def __contains__(self, spec: CallSpec) -> bool:
        return spec in self._calls

    def find(self, spec: CallSpec, pin: bool = False, table: ChunkLayout | None = None) -> int:
        """Return the call, making it the first time.

        Args:
            spec: What it does.
            pin: It becomes part of a CUDA graph, and has to stay. The capture is under way, so no
                other call is freed: that waits for the device, which would end the capture.
            table: Where blocks lie, if their sizes differ.

        Raises:
            ScheduleError: If its plans do not fit the group.
        """
        key = _key(spec, table)
        call = self._calls.get(key)
        if call is None:
            if not pin:
                self._make_room()
            call = self._calls[key] = self._make(spec, table)
        self._calls.move_to_end(key)
        if pin:
            self._pinned.add(call)
        return call

    def _make(self, spec: CallSpec, table: ChunkLayout | None) -> int:
        # Only who knows the plans of all ranks can choose packets.
        small = spec.count * spec.itemsize <= _MOST_BYTES
        ranks = range(self._n) if small and spec.direct and table is None else self._ranks
        bare = replace(spec, count=0, dtype=0, itemsize=1, op=ReduceOp.SUM)  # all that plans need
        plans, number = _compiled(bare, self._n, tuple(ranks))
        made = [device_spec(spec, plan, self._n, number, table) for plan in plans]
        specs = (Spec * len(made))(*(filled for filled, _ in made))
        return library().pointer("call_create", self._group, specs, len(made))

    def _make_room(self) -> None:
        for spec, call in list(self._calls.items())[: max(0, len(self._calls) - _MAX_CALLS + 1)]:
            if call not in self._pinned:
                library().call("call_destroy", self._calls.pop(spec))

    def info(self, spec: CallSpec, method: int = BEST) -> CallInfo:
        """Tell which kernel runs a call, and how."""
        found = CallInfo()
        library().call("call_info", self.find(spec), method, byref(found))
        return found

    def clear(self) -> None:
        """Free all calls; waits for the device."""
        for call in self._calls.values():
            library().call("call_destroy", call)
        self._calls.clear()
