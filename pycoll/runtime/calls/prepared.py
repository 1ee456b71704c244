"""A call before it runs: what was asked for, and what has been made ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycoll import _C
from pycoll.runtime.arrays.layouts import Detour, Mirror
from pycoll.runtime.calls.plans import CallSpec
from pycoll.schedule.ir import Algorithm
from pycoll.types import Kind

_COLLECTIVES = {kind: kind.name.lower().removesuffix("_v") for kind in Kind}
_COLLECTIVES[Kind.BARRIER] = "all_reduce"


@dataclass(frozen=True)
class Request:
    """What the caller asked for, apart from the arrays.

    Attributes:
        kind, op, root, order, algorithm: See `pycoll.Communicator`.
        within: Kind of the call that this one is a part of: ranks that make another one differ.
    """

    kind: Kind
    op: str = "sum"
    root: int = 0
    order: str | None = None
    algorithm: str | Algorithm | None = None
    within: Kind | None = None

    @property
    def collective(self) -> str:
        """Name of the collective whose schedule is run."""
        return _COLLECTIVES[self.kind]


@dataclass
class Prepared:
    """A call that is ready to run.

    Attributes:
        binding: Plan, sizes and descriptor.
        in_ptr, out_ptr: Addresses of the user's memory, 0 where there is none.
        result: What the call returns.
        keep: Objects that must stay alive until the call is done.
        spec: What it does, apart from where the arrays are.
        two_levels: Nobody has asked for an algorithm, so it may go through hosts first.
        plain: It works on the caller's own arrays, or a packed input: a call like it needs no
            preparation if they are of a kind that the hot path knows.
        registered: Registered arrays, or parts of them, that stay where they are meanwhile.
        gathers, scatters: What lies elsewhere for the engine: arrays it reads, and those it writes.
    """

    binding: _C.BoundCall
    in_ptr: int
    out_ptr: int
    result: Any
    keep: tuple
    plain: bool = False
    spec: CallSpec | None = None
    two_levels: bool = False
    registered: tuple[Mirror, ...] = ()
    gathers: tuple[Mirror | Detour, ...] = ()
    scatters: tuple[Mirror | Detour, ...] = ()

    def detours(self) -> tuple[_C.Detours, ...]:
        """Return what the engine has to copy around the call, if it has to; see there."""
        if not self.gathers and not self.scatters:
            return ()
        before = [copy for mirror in self.gathers for copy in mirror.copies_in()]
        after = [copy for mirror in self.scatters for copy in mirror.copies_out()]
        return (_C.Detours(before, after),)
