"""From the arguments of a collective on device arrays to a call that is ready to be launched.

The checks are those for host arrays; what differs is where arrays come from and the choice of an
algorithm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pycoll.algorithms import ALGORITHMS
from pycoll.cuda.device import arrays
from pycoll.cuda.device.library import library
from pycoll.cuda.transports.bound_calls import element_type
from pycoll.cuda.transports.nccl_bindings import NATIVE
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import ArrayView
from pycoll.runtime.calls.descriptors import algorithm_number
from pycoll.runtime.calls.plans import CallSpec, compile_plans
from pycoll.runtime.calls.prepare import Caller
from pycoll.runtime.calls.prepared import CallRequest, Prepared
from pycoll.runtime.selection.select import Choice, SelectionRequest, select
from pycoll.schedule.cost.cost import Machine
from pycoll.schedule.ir import Algorithm
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.types import DType, ReduceOp

_SMALL_BYTES = 64 << 10
_SMALL_ALL_REDUCE = ("one_shot", "one_shot_rank")
_ALGORITHMS = {
    "all_reduce": ("two_shot_push", "two_shot_push_rank"),
    "reduce_scatter": ("direct", "direct_rank"),
    "reduce": ("direct", "direct_rank"),
    "all_gather": ("direct_push",),
}
"""Where ranks reach each other's memory, the first that gives the order; elsewhere ``direct``."""
_IN_PACKETS = ("all_reduce", "all_gather", "all_to_all", "broadcast")


@dataclass
class DevicePlans:
    """Takes the place of the cache of plans: a transport compiles them when it launches."""

    # rank, world_size: of the caller
    rank: int
    world_size: int
    messages: bool  # ranks send messages; otherwise they reach each other's memory

    def bind(self, spec: CallSpec) -> CallSpec:
        """Return the call itself."""
        return spec

    def known(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Make it anew: the choice depends on more than the key."""
        return make()


def number_of(spec: CallSpec, world_size: int, messages: bool) -> int:
    """Return the number of a call's algorithm, which ranks compare; see `algorithm_number`.

    Raises:
        ScheduleError: If the algorithm is not of the registry, and its proof fails.
    """
    if spec.algorithm in ALGORITHMS or spec.algorithm.name == NATIVE:
        return algorithm_number(spec.algorithm, dict(spec.params))
    return compile_plans(spec, world_size, [], messages)[1]


class InputCopy(NamedTuple):
    """A call works on a copy of its input."""

    address: int  # of the copy
    given: ArrayView  # what it is a copy of

    @property
    def repeatable(self) -> bool:
        """Whether bytes can be copied as they are."""
        return bool(self.given.array.flags.c_contiguous)


@dataclass(frozen=True)
class DeviceCaller(Caller):
    """Prepares calls on device arrays that are used on one stream.

    Attributes:
        plans: A `DevicePlans`.
        memory: Tells which arrays peers reach.
        device: Number of the device on which all arrays have to be, -1 for any.
        stream: Handle of the stream.
        always_direct: Peers reach every array, so nothing is staged.
        in_place: Some rank passes its input as output too.
        copy_bytes: From which size on copy engines make a call that they can make; 0: never.
    """

    device: int = -1
    stream: int = 0
    always_direct: bool = False
    in_place: bool = False
    copy_bytes: int = 0

    def prepare(self, request: CallRequest, x: Any, out: Any) -> Prepared:
        """See `Caller.prepare`; a call that cannot work in place gets a copy of its input."""
        prepared = super().prepare(request, x, out)
        algorithm, direct = prepared.spec.algorithm, prepared.spec.direct
        given = self.view(x, "x") if prepared.in_ptr else None
        needs_two = not algorithm.in_place and (direct or self.plans.messages)
        if given is not None and prepared.in_ptr == prepared.out_ptr and needs_two:
            copy = self.duplicate(given)
            prepared.in_ptr, prepared.keep = copy.pointer, (*prepared.keep, copy.array)
        copied = given is not None and prepared.in_ptr != given.pointer
        prepared.gathers = (InputCopy(prepared.in_ptr, given),) if copied else ()
        return prepared

    def _rounds_at_the_end(self, request: CallRequest, op: ReduceOp, source: ArrayView) -> bool:
        """Tell that results are in the type of the arrays; nothing is rounded after a call."""
        return False

    def view(self, x: Any, what: str) -> ArrayView:
        """Look at an array on the device."""
        v = arrays.device_view(x, what, self.stream)
        found = arrays.device_of(v) if v.array.size else self.device
        if self.device not in (-1, found):
            raise ArgumentError(
                f"{what} lies on device {found}, expected device {self.device}: that which was "
                "current when the communicator was first used with device arrays"
            )
        return v

    def new_like(self, v: ArrayView, shape: tuple[int, ...]) -> Any:
        """Make an array like another one."""
        return arrays.new_like(v, shape)

    def duplicate(self, v: ArrayView) -> ArrayView:
        """Return a contiguous copy, which peers reach if they reach the array."""
        make = self.memory.empty if self.memory.holds(v) else arrays.cupy().empty
        return arrays.duplicate(v, make, self.stream)

    def _choose(
        self,
        request: CallRequest,
        op: ReduceOp,
        count: int,
        typed: ArrayView,
        reach: dict[str, bool],
    ) -> Choice:
        promise, nbytes = COLLECTIVES[request.collective], count * typed.array.itemsize
        dtype = typed.dtype if promise.reduces else None
        if dtype is not None and request.algorithm != NATIVE and not library().supports(dtype, op):
            raise ArgumentError(
                f"{op.name.lower()} of {typed.name} has no kernel; on devices such elements can be "
                "added and averaged"
            )
        what = request.collective, nbytes, self.plans.world_size, request.order or "", dtype, op
        wanted = SelectionRequest(
            *what, **reach, in_place=self.in_place, messages=self.plans.messages
        )
        name = request.algorithm
        large = 0 < self.copy_bytes <= nbytes and not self.plans.messages
        copied = large and request.collective in ("all_gather", "broadcast")
        if name is None and copied and request.collective == "all_gather":
            name = "direct_pull"  # copies into a rank's own output alone
        packets = name is None and not copied
        packets = packets and self._in_packets(request.collective, nbytes, dtype, op)
        choice = choose(replace(wanted, in_place=True) if packets else wanted, name)
        if packets:
            return replace(choice, direct=True)
        # Some rank may work in place, unknown to the others; `_untangle` copies what transposes.
        wanted = replace(wanted, in_place=not promise.transposes)
        reached = self.always_direct or wanted.may_be_direct(choice.algorithm)
        direct = reached and not self.plans.messages
        return replace(choice, direct=direct)

    def _in_packets(self, collective: str, nbytes: int, dtype: DType | None, op: ReduceOp) -> bool:
        """Tell whether peers send each other all they fold or get, in the low-latency protocol.

        Then every rank reads and writes its own arrays alone, wherever they lie.
        """
        if collective not in _IN_PACKETS or self.plans.messages or self.always_direct:
            return False
        promise, n = COLLECTIVES[collective], self.plans.world_size
        if promise.reduces:
            return dtype is not None and bool(library().in_packets(dtype, op, n, nbytes))
        sent = nbytes if promise.in_at_root else nbytes // n  # from one rank to one other
        return bool(library().in_packets(-1, -1, n, sent))

    def _work_in_heap(self, prepared: Prepared, *arrays: Any) -> None:
        """Put the result of a direct call where peers reach it, if they have to."""
        spec = prepared.spec
        what = spec.collective, spec.count * spec.itemsize, element_type(spec), spec.op
        names = _ALGORITHMS.get(spec.collective, ("direct",))
        if spec.algorithm.name not in names or not self._in_packets(*what):
            super()._work_in_heap(prepared, *arrays)


def choose(request: SelectionRequest, algorithm: str | Algorithm | None) -> Choice:
    """Choose the algorithm of a call on device arrays; see `pycoll.runtime.selection.select`.

    Args:
        request: What is wanted; an empty order stands for the default.
        algorithm: What the caller has named, or None. ``"native"`` is NCCL's own collective.

    Raises:
        ArgumentError: If nothing serves, or what was named does not.
    """
    if algorithm == NATIVE:
        return _native(request)
    names = ("dtype", "op", "direct", "messages")
    options = {"order": request.order or None, **{name: getattr(request, name) for name in names}}
    known = request.collective, request.nbytes, request.n
    if algorithm is not None or request.messages:
        return select(*known, algorithm=algorithm, **options)
    if COLLECTIVES[request.collective].reduces:
        options["order"] = request.order or "tree"
    small = request.nbytes <= _SMALL_BYTES and not request.in_place
    names = _ALGORITHMS.get(request.collective, ("direct",))
    names = _SMALL_ALL_REDUCE if small and request.collective == "all_reduce" else names
    for name in names[:-1]:
        try:
            return select(*known, algorithm=name, **options)
        except ArgumentError:
            continue
    return select(*known, algorithm=names[-1], **options)


def _native(request: SelectionRequest) -> Choice:
    if not request.messages:
        raise ArgumentError(
            "algorithm='native' stands for NCCL's own collectives; make the communicator with "
            "device_transport='nccl'"
        )
    if request.order not in ("", "any"):
        raise ArgumentError(f"order={request.order!r}: NCCL's own collectives promise no order")
    algorithm = _native_algorithm(request.collective)
    return Choice(algorithm, {}, False, "any", "asked for by name", request, Machine())


@functools.cache
def _native_algorithm(collective: str) -> Algorithm:
    """NCCL's own collective, as if it were an algorithm: its rounds are unknown."""
    functions = {"rounds": lambda rank, n: iter(()), "chunks": lambda n: 1, "slots": lambda n: 0}
    return Algorithm(
        collective, NATIVE, **functions, order="any", in_place=True, in_place_staged=True
    )
