"""From what was asked for and chosen to what a call does."""

from __future__ import annotations

from pycoll.runtime.arrays.chunk_layouts import Extents
from pycoll.runtime.arrays.host_arrays import ArrayView
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.calls.prepared import Request
from pycoll.runtime.selection.select import Choice
from pycoll.runtime.selection.single_copy import with_alternative
from pycoll.schedule.ir import Algorithm
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.types import Order, ReduceOp


def call_spec(
    request: Request,
    op: ReduceOp,
    root: int,
    count: int,
    typed: ArrayView,
    choice: Choice,
    input_only: bool,
    apart: bool = False,
) -> CallSpec:
    """Return what a call does, as it was asked for and chosen.

    Args:
        request: What the caller asked for.
        op: Reduction operation.
        root: Root rank, or 0.
        count: Elements of the full vector.
        typed: An array of the type that the engine works with.
        choice: The algorithm.
        input_only: Only inputs lie where peers reach them.
        apart: See `CallSpec`.
    """
    params = dict(choice.params)
    if "root" in choice.algorithm.params:
        params["root"] = root
    spec = CallSpec(
        kind=request.within or request.kind,
        collective=request.collective,
        algorithm=choice.algorithm,
        params=tuple(sorted(params.items())),
        direct=choice.direct,
        input_only=choice.direct and input_only,
        apart=apart,
        dtype=typed.code,
        told=typed.told,
        itemsize=typed.array.itemsize,
        count=count,
        op=op if COLLECTIVES[request.collective].reduces else ReduceOp.SUM,
        order=Order[(choice.order or "any").upper()],
        root=root,
    )
    may_read = request.algorithm is None and request.within is None
    return with_alternative(spec, choice) if may_read else spec


def table_spec(request: Request, algorithm: Algorithm, v: ArrayView, extents: Extents) -> CallSpec:
    """Return the call of a v-variant, whose blocks differ in size."""
    total = int(extents.out_length[0].sum()) if len(extents.out_length) else 0
    params = (("root", request.root),) if "root" in algorithm.params else ()
    return CallSpec(
        kind=request.kind,
        collective=request.collective,
        algorithm=algorithm,
        params=params,
        direct=False,
        dtype=v.code,
        told=v.told,
        itemsize=v.array.itemsize,
        count=total,
        root=request.root,
        op=ReduceOp[request.op.upper()],
        order=Order[(request.order or "any").upper()],
    )
