"""From the arguments of a collective to a prepared call: shapes, counts, memory, algorithm.

Everything that can be wrong with the arguments is found here, before anything reaches a peer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pycoll import _C
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import (
    ArrayView,
    as_reducible,
    check_output,
    new_like,
    overlap,
    view,
)
from pycoll.runtime.arrays.layouts import (
    RESULT_SHAPE,
    Detour,
    RegisteredPart,
    Shape,
    stacked_shape,
)
from pycoll.runtime.arrays.neutral import fill_with_neutral
from pycoll.runtime.arrays.symmetric_memory import AUTOMATIC_BYTES, Memory
from pycoll.runtime.arrays.widened import widened
from pycoll.runtime.calls.plans import CallSpec, PlanCache
from pycoll.runtime.calls.prepared import CallRequest, Prepared, call_spec
from pycoll.runtime.selection.select import Choice, select, working_dtype
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.types import Kind, Order, ReduceOp, reduce_op

# Collectives that can work on the arrays themselves: every rank can tell whether all of them lie in
# symmetric memory. Of a broadcast and of a reduction to one rank, x counts on every rank.
_ALIASING = (  # these may also work in place
    Kind.ALL_REDUCE,
    Kind.REDUCE_SCATTER,
    Kind.ALL_GATHER,
    Kind.BROADCAST,
    Kind.REDUCE,
)
DIRECT_KINDS = (*_ALIASING, Kind.ALL_TO_ALL)
# Likewise on the inputs alone, if only they lie there.
INPUT_KINDS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_TO_ALL)
_ORDERS = tuple(o.name.lower() for o in Order)
_OWN_KINDS = (Kind.REDUCE_SCATTER, Kind.ALL_GATHER)  # not in place in two levels


def reached(kind: Kind, x: bool, out: bool) -> tuple[bool, bool]:
    """Tell which arrays of a call peers work on, as the arrays' places are the same on every rank.

    Args:
        kind: Kind of collective.
        x: The input lies in symmetric memory.
        out: The result does.

    Returns:
        Whether they work on all of them, and whether they read the inputs alone.
    """
    everything = kind in DIRECT_KINDS and x and (out or kind == Kind.REDUCE)
    return everything, kind in INPUT_KINDS and x and not everything


@dataclass(frozen=True)
class Caller:
    """The side of a communicator that prepares calls."""

    plans: PlanCache  # its plan cache, which knows rank and world size
    memory: Memory  # this rank's part of the symmetric heap
    # Arrays of a call count as symmetric by their size, wherever they lie: `Config.symmetric`.
    by_size: bool = field(default=False, kw_only=True)

    def prepare(self, request: CallRequest, x: Any, out: Any) -> Prepared:
        """Check the arguments and choose and bind a plan.

        Raises:
            ArgumentError: If the arguments cannot be used; the text says what is accepted.
        """
        op, root = self.check_request(request)
        spec = COLLECTIVES[request.collective]
        n, at_root = self.plans.world_size, self.plans.rank == root
        has_in = not spec.in_at_root or at_root
        has_out = (not spec.out_at_root or at_root) and spec.sources(self.plans.rank, n) > 0
        given, shape, block = self._shapes(request.kind, x, out, has_in)
        if spec.out_at_root and not at_root and out is not None:
            raise ArgumentError(f"out is for the root, rank {root}; this is rank {self.plans.rank}")
        result, target = None, None
        if request.kind == Kind.BROADCAST and out is x:
            result, given = x, self._received(given, at_root)
            target = given
        elif has_out or spec.prefix is not None:
            result = self.new_like(given, shape) if out is None else out
            target = self.view(result, "out")
            other = stacked_shape(request.kind, tuple(given.array.shape), n)
            check_output(target, shape, given, stacked=other)
        if spec.prefix is not None and op == ReduceOp.AVG:
            raise ArgumentError(f"op='avg' is not defined for {request.collective}")
        reduces = spec.reduces and request.kind != Kind.BARRIER
        source, neutral = given, None if has_out else target
        if reduces:
            source = as_reducible(self._contiguous(given), request.op, "x")
            target = as_reducible(target, request.op, "out") if target is not None else None
        elif has_in:
            source = self._contiguous(given)
        source = self._untangle(request.kind, source, target) if has_in else source
        if neutral is not None:  # nobody is below the first rank of an exscan
            fill_with_neutral(neutral, request.op)
            target = None
        count = source.array.size if reduces else block
        scale = n if spec.in_layout == "own" else 1
        narrow = source, target
        if spec.prefix is not None and self._rounds_at_the_end(request, op, source):
            source = widened(source)
            target = target and source._replace(array=np.empty_like(source.array))
        prepared = self._bind(
            request, op, root, count * scale, source if has_in else None, target, source, result
        )
        if neutral is not None:
            prepared.fills(neutral.array, plain=source is narrow[0])
        if target is not None and target.dtype != narrow[1].dtype:
            prepared.plain, prepared.wide = False, (target.array, narrow[1])
        return prepared

    def _rounds_at_the_end(self, request: CallRequest, op: ReduceOp, source: ArrayView) -> bool:
        """Tell whether a prefix reduction is made in a wider type than that of its arrays."""
        if request.algorithm is not None:
            return False
        asked = request.collective, self.plans.world_size, source.dtype, op, request.order
        return working_dtype(*asked) != source.dtype

    def view(self, x: Any, what: str) -> ArrayView:
        """Look at an array of the caller's."""
        return view(x, what)

    def new_like(self, v: ArrayView, shape: Shape) -> Any:
        """Make an uninitialised array of the caller's own kind."""
        return new_like(v, shape)

    def duplicate(self, v: ArrayView) -> ArrayView:
        """Return a contiguous copy of an array."""
        if not self.memory.holds(v):
            return v._replace(array=v.array.copy())
        copy = self.memory.empty(v.array.shape, v.array.dtype)  # where peers can reach it, too
        copy[...] = v.array
        return v._replace(array=copy)

    def _received(self, given: ArrayView, at_root: bool) -> ArrayView:
        """Return where a broadcast in place works; the root's array is only read."""
        if at_root:
            flags = given.array.flags
            return given if flags.writeable and flags.c_contiguous else self.duplicate(given)
        try:
            check_output(given, tuple(given.array.shape), given, "x")
        except ArgumentError as error:
            raise ArgumentError(
                f"{error}; broadcast fills x on every rank but the root, unless there is an out="
            ) from None
        return given

    def _set_apart(self, v: ArrayView) -> ArrayView:
        return self.duplicate(v)._replace(apart=True)

    def _contiguous(self, v: ArrayView) -> ArrayView:
        return v if v.array.flags.c_contiguous else self.duplicate(v)

    def check_request(self, request: CallRequest) -> tuple[ReduceOp, int]:
        """Check what does not depend on the arrays; return the operation and the root."""
        op = reduce_op(request.op)
        root, n = request.root, self.plans.world_size
        # An array could be changed behind a call that is remembered by its arguments.
        if type(root) is bool or not isinstance(root, int | np.integer) or not 0 <= root < n:
            raise ArgumentError(f"root={root!r} is not a rank; accepted: 0 to {n - 1}")
        order = request.order
        if order is not None and not (isinstance(order, str) and order in _ORDERS):
            names = ", ".join(_ORDERS)
            raise ArgumentError(f"order={order!r} is not known; accepted: {names}")
        return op, int(root)

    def _shapes(self, kind: Kind, x: Any, out: Any, has_in: bool) -> tuple[ArrayView, Shape, int]:
        """Return the array that tells the dtype, the result's shape, elements of the input."""
        if kind == Kind.SCATTER and not has_in and x is None:
            if out is None:
                raise ArgumentError(
                    "scatter needs out=, or an x like the root's, on ranks that are not the root; "
                    "for a list of objects there is scatter_object"
                )
            given = self.view(out, "out")
            size = given.array.size * self.plans.world_size
            return given, tuple(given.array.shape), size
        given = self.view(x, "x")
        shape = RESULT_SHAPE[kind](tuple(given.array.shape), self.plans.world_size)
        return given, shape, given.array.size

    def _untangle(self, kind: Kind, source: ArrayView, target: ArrayView | None) -> ArrayView:
        """Refuse partly overlapping input and output; copy the input where in place cannot work."""
        if target is None or not overlap(source, target):
            return source
        a, b = source.pointer, target.pointer
        own_block = self.plans.rank * min(source.array.nbytes, target.array.nbytes)
        aligned = {
            Kind.ALL_GATHER: a == b + own_block,
            Kind.REDUCE_SCATTER: b == a + own_block,
        }.get(kind, a == b and source.array.nbytes == target.array.nbytes)
        if not aligned:
            raise ArgumentError(
                "x and out overlap partly; pass out=x to work in place, or memory of its own"
            )
        one_level = kind not in _OWN_KINDS or not self.plans.messages or self.plans.one_host
        return source if kind in _ALIASING and one_level else self._set_apart(source)

    def _bind(
        self,
        request: CallRequest,
        op: ReduceOp,
        root: int,
        count: int,
        source: ArrayView | None,
        target: ArrayView | None,
        typed: ArrayView,
        result: Any,
    ) -> Prepared:
        if self.by_size:
            large = self._is_large(request.kind, typed)
            held = large, large
            if large and source is not None and request.kind in DIRECT_KINDS:
                source = typed = self.memory.within_reach(source)
        else:
            held = self.memory.holds(typed), target is not None and self.memory.holds(target)
        direct, input_only = reached(request.kind, *held)
        input_only = input_only and self.memory.has(typed)
        reach = {"direct": direct, "input_only": input_only}
        shared = source is not None and target is not None and overlap(source, target)
        apart = self.plans.messages and COLLECTIVES[request.collective].reduces and not shared
        choice, spec, binding = self._bound(request, op, root, count, typed, reach, apart)
        as_given = choice.algorithm.in_place if choice.direct else choice.algorithm.in_place_staged
        if source is not None and shared and not as_given:
            source = self._set_apart(source)
        in_ptr = source.pointer if source is not None else 0
        out_ptr = target.pointer if target is not None else 0
        keep = source and (source.source, source.array), target and (target.source, target.array)
        plain = source is None or not source.apart
        prepared = Prepared(binding, in_ptr, out_ptr, result, keep, plain, spec=spec)
        prepared.two_levels = request.algorithm is None and choice.measured is None
        parts = [v and self.memory.registered(v) for v in (source, target)]
        prepared.registered = tuple(part for part in parts if part is not None)
        if choice.direct and not input_only:
            self._work_in_heap(prepared, target, *parts)
        return prepared

    def _is_large(self, kind: Kind, x: ArrayView) -> bool:
        """Whether NumPy puts both arrays of a call into the heap; the same on every rank."""
        shrinks = kind == Kind.REDUCE_SCATTER
        return x.array.nbytes // (self.plans.world_size if shrinks else 1) >= AUTOMATIC_BYTES

    def _bound(
        self,
        request: CallRequest,
        op: ReduceOp,
        root: int,
        count: int,
        typed: ArrayView,
        reach: dict[str, bool],
        apart: bool,
    ) -> tuple[Choice, CallSpec, _C.BoundCall]:
        """Choose the algorithm of a call and bind its plan; quick for a call made before."""

        def make() -> tuple[Choice, CallSpec, _C.BoundCall]:
            choice = self._choose(request, op, count, typed, reach)
            spec = call_spec(request, op, root, count, typed, choice, reach["input_only"], apart)
            return choice, spec, self.plans.bind(spec)

        if request.algorithm is not None:  # which may be anything, and is seldom named
            return make()
        asked = request.kind, request.within, request.agreed, op, root, request.order
        key = (
            *asked,
            count,
            typed.code,
            typed.caller_code,
            typed.array.itemsize,
            *reach.values(),
            apart,
        )
        return self.plans.known(key, make)

    def _choose(
        self,
        request: CallRequest,
        op: ReduceOp,
        count: int,
        typed: ArrayView,
        reach: dict[str, bool],
    ) -> Choice:
        return select(
            request.collective,
            count * typed.array.itemsize,
            self.plans.world_size,
            order=request.order,
            dtype=typed.dtype if COLLECTIVES[request.collective].reduces else None,
            op=op,
            **reach,
            algorithm=request.algorithm,
            messages=self.plans.messages,
            one_host=self.plans.one_host,
            crowded=self.plans.crowded,
            world=self.plans.world,
        )

    def _work_in_heap(
        self,
        prepared: Prepared,
        target: ArrayView | None,
        read: RegisteredPart | None,
        written: RegisteredPart | Detour | None,
    ) -> None:
        """Let a direct call work on registered arrays where the heap has them."""
        if target is not None and written is None:
            written = self.memory.reach(target)
        if read is not None:
            prepared.in_ptr, prepared.gathers = read.address, (read,)
        if written is not None:
            prepared.out_ptr, prepared.scatters = written.address, (written,)
            prepared.gathers += (written,)
        elsewhere = any(isinstance(part, Detour) for part in prepared.gathers)
        prepared.plain = prepared.plain and not elsewhere
