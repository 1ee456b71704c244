"""The engine of pycoll; contracts are in the headers under csrc/."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

class EngineError(RuntimeError): ...

class Plan:
    def __init__(
        self,
        code: bytes,
        operands: bytes,
        world_size: int,
        rank: int,
        chunks: int,
        slots: int,
        rounds: int,
        direct: bool,
    ) -> None: ...

class BoundCall:
    @property
    def segments(self) -> int: ...
    @property
    def tiny(self) -> bool: ...

class Heap:
    def __init__(self, fd: int, regions: int, region_bytes: int) -> None: ...
    def contains(self, pointer: int, nbytes: int) -> bool: ...
    def empty(self, region: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray: ...

class Control:
    def __init__(
        self,
        fd: int,
        world_size: int,
        cell_bytes: int,
        mailbox_bytes: int,
        start_iteration: int = 2,
    ) -> None: ...

class Engine:
    def __init__(
        self,
        control: Control,
        heap: Heap,
        rank: int,
        timeout_s: float,
        threads: bool,
        spins: int = -1,
    ) -> None: ...
    def bind(
        self,
        plan: Plan,
        dtype: int,
        op: int,
        itemsize: int,
        count: int,
        chunk: int,
        layout_in: int,
        layout_out: int,
        descriptor: int,
        scale_n: int,
        scale_at_exit: bool,
        extents: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None,
    ) -> BoundCall: ...
    def site(self, text: str) -> int: ...
    def run(
        self, call: BoundCall, in_ptr: int, out_ptr: int, site: int, timeout_s: float
    ) -> None: ...
    def submit(
        self, call: BoundCall, in_ptr: int, out_ptr: int, site: int, timeout_s: float
    ) -> int: ...
    def done(self, ticket: int) -> bool: ...
    def wait(self, ticket: int, timeout_s: float) -> None: ...
    def refuse(self, text: str, site: int) -> None: ...
    def abort(self, text: str) -> None: ...
    def leave(self, text: str) -> None: ...
    def close(self) -> None: ...
    def report(self) -> dict[str, Any] | None: ...
    @property
    def iteration(self) -> int: ...

class Mailboxes:
    def __init__(self, engine: Engine) -> None: ...
    def send(
        self, data: int, nbytes: int, type: int, dst: int, tag: int, timeout_s: float
    ) -> None: ...
    def recv(
        self, data: int, nbytes: int, type: int, src: int, tag: int, timeout_s: float
    ) -> int: ...

class Fastcall:
    def __init__(
        self,
        engine: Engine,
        heap: Heap,
        slow: Callable[[], Any],
        site: Callable[[], Any],
        fail: Callable[[], Any],
    ) -> None: ...
    def remember(self, *args: Any) -> None: ...
    def forget(self) -> None: ...

class Method:
    def __init__(self, kind: int, names: tuple, positional: tuple, defaults: tuple) -> None: ...
    def __call__(self, *args: Any, **options: Any) -> Any: ...

def fold_isa() -> str: ...
def open_dlpack(capsule: Any) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...], Any]: ...
def array_at(
    pointer: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype, owner: Any
) -> np.ndarray: ...
def sizes() -> tuple[int, int, int, int]: ...

EXACT_LIMBS: int
EXACT_BIAS: int

def optim_step(
    kind: int,
    state: int,
    grad: int,
    copy: int,
    param: int,
    gradient: int,
    first: int,
    second: int,
    target: int,
    count: int,
    scalars: Sequence[float],
) -> None: ...
def optim_unscale(type: int, input: int, output: int, count: int, scale: float) -> int: ...
def optim_nonfinite(type: int, data: int, count: int) -> int: ...
def optim_add_squares(type: int, data: int, count: int, limbs: np.ndarray) -> int: ...
def optim_isa() -> str: ...
def optim_force_isa(name: str) -> bool: ...
