"""Running a program on a device: a walk over its steps, each of them put on a stream."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from pycoll.cuda.calls.program import Copy, DeviceFold, Group, Program, Ref, Scale
from pycoll.types import DType, ReduceOp


class Device(Protocol):
    """What a rank does with its own memory; everything is put on the stream and returns at once."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy bytes."""

    def fold(
        self,
        dtype: DType,
        op: ReduceOp,
        step: DeviceFold,
        srcs: Sequence[int],
        dsts: Sequence[int],
        stream: int,
    ) -> None:
        """Combine sources in order, with the contract of ``csrc/kernels/fold/fold.h``."""

    def scale(self, dtype: DType, pointer: int, count: int, n: int, stream: int) -> None:
        """Divide elements by n."""


class Wire(Protocol):
    """What carries messages: NCCL, or something that keeps its rules."""

    def group(self) -> AbstractContextManager[None]:
        """Post all messages of the body together."""

    def send(self, pointer: int, nbytes: int, peer: int, stream: int) -> None:
        """Post one end of a message."""

    def recv(self, pointer: int, nbytes: int, peer: int, stream: int) -> None:
        """Post the other end."""


def execute(
    program: Program,
    pointers: Sequence[int],
    wire: Wire,
    device: Device,
    dtype: DType,
    op: ReduceOp,
    stream: int,
) -> None:
    """Put all steps of a program on a stream, in order.

    Args:
        program: What to do.
        pointers: Address of each region: input, output, scratch.
        wire: Carries the messages.
        device: Does the copies and folds.
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
        elif isinstance(step, DeviceFold):
            srcs, dsts = map(at, step.srcs), map(at, step.dsts)
            device.fold(dtype, op, step, list(srcs), list(dsts), stream)
        elif isinstance(step, Scale):
            device.scale(dtype, at(step.ref), step.count, step.n, stream)
