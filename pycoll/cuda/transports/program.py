"""From a plan of messages to what one rank does on a device: groups of messages, copies, folds.

A round of a plan becomes at most two groups of sends and receives, with folds between them. NCCL
wants both ends of a message to have the same size, and one end of a message does not know where the
other has it; so every message carries whole chunks, and an end that does not have them in one piece
of full length copies them through a bounce buffer in scratch memory::

    scratch:  slot 0 | slot 1 | ... | bounce buffers of the present group

`lower` is arithmetic on byte offsets; `execute` puts the steps on a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.plan import FOLD_COMPLETE, FOLD_TREE, Opcode, Plan, PlanBuffer
from pycoll.types import DType, ReduceOp

_ALIGN = 16  # of scratch memory: folds load 16 bytes at a time


class Region(IntEnum):
    """Memory that a program names; the numbers of IN and OUT are those of `PlanBuffer`."""

    IN = 0
    OUT = 1
    SCRATCH = 2


class Ref(NamedTuple):
    """Where something lies: a region, and bytes from its start."""

    region: Region
    offset: int


class Message(NamedTuple):
    """One end of a message."""

    peer: int
    ref: Ref
    nbytes: int


@dataclass(frozen=True)
class Group:
    """Messages posted together and complete together; between two ranks the k-th meets the k-th."""

    round: int  # round of the schedule, for reports
    # sends, receives: in the order in which they are posted
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True)
class Copy:
    """Copy bytes within this rank's memory."""

    src: Ref
    dst: Ref
    nbytes: int


@dataclass(frozen=True)
class DeviceFold:
    """Combine sources in order, store the result; the contract is in csrc/kernels/fold/fold.h."""

    # srcs, dsts: where the pieces lie
    srcs: tuple[Ref, ...]
    dsts: tuple[Ref, ...]
    count: int  # elements
    tree: bool  # along the in-order balanced tree, otherwise left to right
    scale_n: int  # divisor of the result, or 0; one source and a divisor finish an average


Step = Group | Copy | DeviceFold


@dataclass(frozen=True)
class Extent:
    """Sizes of a call: what turns chunks into bytes."""

    count: int  # elements of the full vector
    chunk: int  # elements of a chunk; the last ones may have fewer
    itemsize: int  # bytes of an element
    # own_in, own_out: the buffer has only the owner's share of the chunks
    own_in: bool = False
    own_out: bool = False
    scale_n: int = 0  # divisor of an average, else 0
    # scale_at_exit: no single fold sees all contributions, so the result is divided at the end
    scale_at_exit: bool = False


@dataclass(frozen=True)
class Program:
    """What one rank does, in order."""

    steps: tuple[Step, ...]  # the steps of all segments
    scratch_bytes: int  # scratch memory that they use
    segments: int  # into how many segments every chunk was cut


def lower(plan: Plan, extent: Extent, scratch_limit: int = 256 << 20) -> Program:
    """Turn a plan of messages into steps.

    All ranks cut chunks alike, so the cut depends on the schedule and not on the slots of a rank.

    Args:
        plan: The plan of one rank.
        extent: Sizes of the call.
        scratch_limit: Roughly the most scratch memory that slots use, in bytes.
    """
    largest = min(extent.chunk, extent.count)
    schedule = plan.schedule
    slots = max(schedule.n, schedule.chunks) + schedule.slots
    segment = min(largest, max(1, scratch_limit // (slots * extent.itemsize)))
    starts = range(0, largest, segment) if segment else ()
    steps: list[Step] = []
    scratch = 0
    for start in starts:
        window = _Window(plan, extent, start, min(segment, largest - start), segment)
        steps += window.steps()
        scratch = max(scratch, window.scratch)
    if extent.scale_at_exit and extent.scale_n:
        steps += _scales(plan, extent)
    return Program(tuple(steps), scratch, len(starts))


def _scales(plan: Plan, extent: Extent) -> Iterator[DeviceFold]:
    if COLLECTIVES[plan.schedule.collective].out_at_root and plan.rank != plan.schedule.root:
        return  # it has no output
    whole = _Window(plan, extent, 0, min(extent.chunk, extent.count), 0)
    n, chunks = plan.schedule.n, plan.schedule.chunks
    share = chunks // n
    mine = range(plan.rank * share, (plan.rank + 1) * share) if extent.own_out else range(chunks)
    for chunk in mine:
        ref, length = whole.place(PlanBuffer.OUT, plan.rank, chunk)
        if length:
            yield DeviceFold((ref,), (ref,), length, False, extent.scale_n)


@dataclass
class _Window:
    """Elements ``[start, start + reach)`` of every chunk."""

    plan: Plan
    extent: Extent
    start: int
    reach: int
    segment: int
    scratch: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        pitch = self.segment * self.extent.itemsize
        self.stride = -(-pitch // _ALIGN) * _ALIGN
        self.base = self.scratch = self.plan.slots * self.stride

    def steps(self) -> Iterator[Step]:
        """Yield the steps of this segment."""
        code = self.plan.code
        begin = 0
        for i, instr in enumerate(code):
            if instr["op"] == Opcode.FOLD:
                yield from self._fold(instr)
                begin = i + 1
            elif instr["op"] == Opcode.WAIT:
                yield from self._group(code[begin:i])
                begin = i + 1

    def place(self, buffer: int, rank: int, chunk: int) -> tuple[Ref, int]:
        """Return where a chunk lies in this window, and how many elements it has there."""
        extent = self.extent
        if buffer == PlanBuffer.STAGING:
            return Ref(Region.SCRATCH, chunk * self.stride), self.reach
        schedule = self.plan.schedule
        chunk %= schedule.chunks
        offset = chunk * extent.chunk
        length = min(extent.chunk, extent.count - offset, self.start + self.reach) - self.start
        if extent.own_in if buffer == PlanBuffer.IN else extent.own_out:
            offset -= rank * (schedule.chunks // schedule.n) * extent.chunk
        ref = Ref(Region(buffer), (offset + self.start) * extent.itemsize)
        return ref, max(0, length)

    def _places(self, operand: np.void, count: int) -> list[tuple[Ref, int]]:
        rank, buffer, chunk = (int(v) for v in operand)
        return [self.place(buffer, rank, chunk + k) for k in range(count)]

    def _together(self, places: list[tuple[Ref, int]]) -> bool:
        """Whether chunks have their full length and follow each other without gaps."""
        pitch = self.reach * self.extent.itemsize
        first = places[0][0]
        return all(
            length == self.reach and ref == Ref(first.region, first.offset + k * pitch)
            for k, (ref, length) in enumerate(places)
        )

    def _group(self, code: np.ndarray) -> Iterator[Step]:
        """Yield a group, with the copies that fill and empty its bounce buffers."""
        room, before, after = self.base, [], []
        ends: dict[int, list[Message]] = {Opcode.SEND: [], Opcode.RECV: []}
        size, pitch = self.extent.itemsize, self.reach * self.extent.itemsize
        for instr in code:
            sends = instr["op"] == Opcode.SEND
            places = self._places(self.plan.operands[int(instr["arg"])], int(instr["count"]))
            nbytes, ref = len(places) * pitch, places[0][0]
            if not self._together(places):
                ref = Ref(Region.SCRATCH, room)
                room += -(-nbytes // _ALIGN) * _ALIGN
                for k, (piece, length) in enumerate(places):
                    there = Ref(Region.SCRATCH, ref.offset + k * pitch)
                    copy = Copy(piece, there, length * size)
                    if length:
                        (before if sends else after).append(
                            copy if sends else replace(copy, src=there, dst=piece)
                        )
            ends[int(instr["op"])].append(Message(int(instr["peer"]), ref, nbytes))
        self.scratch = max(self.scratch, room)
        yield from before
        yield Group(int(code[0]["round"]), tuple(ends[Opcode.SEND]), tuple(ends[Opcode.RECV]))
        yield from after

    def _fold(self, instr: np.void) -> Iterator[Step]:
        """Yield a fold for all chunks at once where they follow each other, else one for each."""
        first, nsrc, count = int(instr["arg"]), int(instr["nsrc"]), int(instr["count"])
        operands = self.plan.operands[first : first + nsrc + int(instr["ndst"])]
        places = [self._places(operand, count) for operand in operands]
        complete = bool(instr["flags"] & FOLD_COMPLETE) and not self.extent.scale_at_exit
        scale_n = self.extent.scale_n if complete else 0
        together = all(self._together(p) for p in places)
        for k in range(1 if together else count):
            length = min(p[k][1] for p in places) * (count if together else 1)
            refs = tuple(p[k][0] for p in places)
            if length == 0:
                continue
            if nsrc == 1 and not scale_n:
                nbytes = length * self.extent.itemsize
                yield from (Copy(refs[0], dst, nbytes) for dst in refs[1:] if dst != refs[0])
                continue
            tree = bool(instr["flags"] & FOLD_TREE)
            yield DeviceFold(refs[:nsrc], refs[nsrc:], length, tree, scale_n)


def execute(
    program: Program,
    pointers: Sequence[int],
    wire: Any,
    device: Any,
    dtype: DType,
    op: ReduceOp,
    stream: int,
) -> None:
    """Put all steps of a program on a stream, in order.

    Args:
        program: What to do.
        pointers: Address of each region: input, output, scratch.
        wire: Carries the messages: a `pycoll.cuda.transports.nccl_bindings.Binding`.
        device: Does the copies and folds: a `pycoll.cuda.device.library.Library`.
        dtype: Element type of folds.
        op: Operation of folds.
        stream: Handle of the CUDA stream.
    """

    def at(ref: Ref) -> int:
        return pointers[ref.region] + ref.offset

    for step in program.steps:
        if isinstance(step, Group):
            with wire.group():
                for m in step.receives:
                    wire.recv(at(m.ref), m.nbytes, m.peer, stream)
                for m in step.sends:
                    wire.send(at(m.ref), m.nbytes, m.peer, stream)
        elif isinstance(step, Copy):
            device.copy(at(step.dst), at(step.src), step.nbytes, stream)
        else:
            srcs, dsts = [*map(at, step.srcs)], [*map(at, step.dsts)]
            device.fold(dtype, op, srcs, dsts, step.count, step.tree, step.scale_n, stream)
