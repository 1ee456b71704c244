"""A call before it runs: what was asked for, and what has been made ready."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pycoll import _C
from pycoll.algorithms import find
from pycoll.runtime.arrays.host_arrays import ArrayView
from pycoll.runtime.arrays.layouts import ChunkLayout, Detour, RegisteredPart
from pycoll.runtime.arrays.widened import narrow
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.selection.select import Choice
from pycoll.schedule.ir import Algorithm
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.types import Kind, Order, ReduceOp, reduce_op

_COLLECTIVES = {kind: kind.name.lower().removesuffix("_v") for kind in Kind}
_COLLECTIVES[Kind.BARRIER] = "all_reduce"


class CallRequest(NamedTuple):
    """What the caller asked for, apart from the arrays."""

    # kind, op, root, order, algorithm: see `pycoll.Communicator`
    kind: Kind
    op: str = "sum"
    root: int = 0
    order: str | None = None
    algorithm: str | Algorithm | None = None
    # kind of the call that this one is a part of: ranks that make another one differ
    within: Kind | None = None
    agreed: int = 0  # see `CallSpec`

    @property
    def collective(self) -> str:
        """Name of the collective whose schedule is run."""
        return _COLLECTIVES[self.kind]


@dataclass
class Prepared:
    """A call that is ready to run."""

    binding: _C.BoundCall  # plan, sizes and descriptor
    # in_ptr, out_ptr: addresses of the user's memory, 0 where there is none
    in_ptr: int
    out_ptr: int
    result: Any  # what the call returns
    keep: tuple[Any, ...]  # objects that must stay alive until the call is done
    # it works on the caller's own arrays, or a packed input: a call like it needs no preparation if
    # they are of a kind that the hot path knows
    plain: bool = False
    spec: CallSpec | None = None  # what it does, apart from where the arrays are
    two_levels: bool = False  # the caller has named no algorithm, so it may run in two levels
    # registered arrays, or parts of them, that stay where they are meanwhile
    registered: tuple[RegisteredPart, ...] = ()
    # gathers, scatters: what lies elsewhere for the engine: arrays it reads, and those it writes
    gathers: tuple[RegisteredPart | Detour, ...] = ()
    scatters: tuple[RegisteredPart | Detour, ...] = ()
    # the result as the engine gives it, in float32, and where it belongs, rounded
    wide: tuple[np.ndarray, ArrayView] | None = None
    neutral: bytes | None = None  # an element that fills a result to which no rank contributes

    def fills(self, result: np.ndarray, plain: bool) -> None:
        """Note what has filled a result to which no rank contributes, for calls like this one."""
        self.neutral = result.reshape(-1)[:1].tobytes()
        self.plain = self.plain and plain and result.size > 0

    def finished(self) -> Any:
        """Return the result of the call, which has succeeded; any thread may, again and again."""
        if self.wide is not None:
            narrow(*self.wide)
        return self.result

    def detours(self) -> tuple[_C.Detours, ...]:
        """Return what the engine has to copy around the call, if it has to; see there."""
        if not self.gathers and not self.scatters:
            return ()
        before = [copy for part in self.gathers for copy in part.copies_in()]
        after = [copy for part in self.scatters for copy in part.copies_out()]
        return (_C.Detours(before, after),)


def call_spec(
    request: CallRequest,
    op: ReduceOp,
    root: int,
    count: int,
    typed: ArrayView,
    choice: Choice,
    input_only: bool,
    apart: bool = False,
) -> CallSpec:
    """Return what a call does, as it was asked for and chosen."""
    return chosen_spec(
        choice,
        request.algorithm is None and request.within is None,
        kind=request.within or request.kind,
        collective=request.collective,
        input_only=choice.direct and input_only,
        apart=apart,
        dtype=typed.code,
        caller_code=typed.caller_code,
        itemsize=typed.array.itemsize,
        count=count,
        op=op if COLLECTIVES[request.collective].reduces else ReduceOp.SUM,
        root=root,
        agreed=request.agreed,
    )


def chosen_spec(choice: Choice, may_read: bool, **what: Any) -> CallSpec:
    """Return a call by the algorithm chosen, with an alternative if it `may_read` private arrays.

    ``what`` are the other fields of `CallSpec`.
    """
    params = dict(choice.params) | dict(_root_of(choice.algorithm, what["root"]))
    order = Order[(choice.order or "any").upper()]
    how = {"params": tuple(sorted(params.items())), "direct": choice.direct, "order": order}
    spec = CallSpec(algorithm=choice.algorithm, **how, **what)
    asked, name = choice.request, _READERS.get(spec.collective) if may_read else None
    if name is None or spec.direct or asked.messages or asked.n == 1 or asked.nbytes < LEAST_BYTES:
        return spec
    algorithm = find(spec.collective, name)
    how = {"params": _root_of(algorithm, spec.root), "direct": True, "across": True}
    return replace(spec, alternative=replace(spec, algorithm=algorithm, **how))


def _root_of(algorithm: Algorithm, root: int) -> tuple[tuple[str, int], ...]:
    return (("root", root),) if "root" in algorithm.params else ()


def table_spec(
    request: CallRequest, algorithm: Algorithm, v: ArrayView, extents: ChunkLayout, agreed: int = 0
) -> CallSpec:
    """Return the call of a v-variant, whose blocks differ in size; for `agreed` see `CallSpec`."""
    return CallSpec(
        kind=request.kind,
        collective=request.collective,
        algorithm=algorithm,
        params=_root_of(algorithm, request.root),
        direct=False,
        dtype=v.code,
        caller_code=v.caller_code,
        itemsize=v.array.itemsize,
        count=int(extents.out_length[0].sum()) if len(extents.out_length) else 0,
        root=request.root,
        op=reduce_op(request.op),
        order=Order[(request.order or "any").upper()],
        agreed=agreed,
    )


LEAST_BYTES = 64 << 10
"""Of the full vector. Below, what the kernel does for a call takes longer than both copies."""

_READERS = {  # in these every rank fetches what it needs, and nobody writes to another
    "all_gather": "direct_pull",
    "broadcast": "direct",
    "scatter": "direct",
    "all_to_all": "direct",
}
