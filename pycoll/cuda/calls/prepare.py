"""From the arguments of a collective on device arrays to a call that is ready to be launched.

The checks are those for host arrays; what differs is where arrays come from and the choice of an
algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pycoll.algorithms import ALGORITHMS
from pycoll.cuda.device import arrays
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
from pycoll.types import ReduceOp

NATIVE = "native"
_SMALL_BYTES = 64 << 10


class _Row(NamedTuple):
    """Algorithms for small and for large vectors, the first that gives the order is taken."""

    small: tuple[str, ...]
    large: tuple[str, ...]


_SUMS = ("direct", "direct_rank")
_RULES = {
    "all_reduce": _Row(("one_shot", "one_shot_rank"), ("two_shot_push", "two_shot_push_rank")),
    "reduce_scatter": _Row(_SUMS, _SUMS),
    "reduce": _Row(_SUMS, _SUMS),
    "all_gather": _Row(("direct_push",), ("direct_push",)),
    **{name: _Row(("direct",), ("direct",)) for name in ("broadcast", "gather", "scatter")},
    "all_to_all": _Row(("direct",), ("direct",)),
}
"""For ranks that reach each other's memory; messages go by the table of the host."""


@dataclass
class DevicePlans:
    """Stands where a cache of plans does: a transport compiles them when it launches.

    Attributes:
        rank, world_size: Of the caller.
        messages: Ranks send messages; otherwise they reach each other's memory.
    """

    rank: int
    world_size: int
    messages: bool

    def bind(self, spec: CallSpec) -> CallSpec:
        """Return the call itself."""
        return spec

    def known(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Make it: what is chosen depends on more than the key."""
        return make()


def number_of(spec: CallSpec, world_size: int, messages: bool) -> int:
    """Return the number of a call's algorithm, which ranks compare; see `algorithm_number`.

    Raises:
        ScheduleError: If the algorithm is not of the registry, and its proof fails.
    """
    if spec.algorithm in ALGORITHMS or spec.algorithm.name == NATIVE:
        return algorithm_number(spec.algorithm, dict(spec.params))
    return compile_plans(spec, world_size, [], messages)[1]


class AnyMemory:
    """All memory of the device: what ranks in one process reach without doing anything."""

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Make an array that peers reach."""
        return arrays.cupy().empty(shape, dtype)

    def holds(self, v: ArrayView) -> bool:
        """Tell that peers reach it."""
        return True

    def has(self, v: ArrayView) -> bool:
        """Tell that on devices no call reads inputs alone where they are."""
        return False

    def mirror(self, v: ArrayView) -> None:
        """Return None: nothing lies elsewhere."""

    def reach(self, v: ArrayView) -> None:
        """Return None: peers write an array where it is."""


class NoMemory(AnyMemory):
    """What ranks that send messages reach of each other."""

    def holds(self, v: ArrayView) -> bool:
        """Tell that peers reach nothing."""
        return False


class InputCopy(NamedTuple):
    """A call works on a copy of its input.

    Attributes:
        address: Of the copy.
        given: What it is a copy of.
    """

    address: int
    given: ArrayView

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
    """

    device: int = -1
    stream: int = 0
    always_direct: bool = False
    in_place: bool = False

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
        wish = SelectionRequest(
            request.collective,
            count * typed.array.itemsize,
            self.plans.world_size,
            request.order or "",
            typed.dtype if COLLECTIVES[request.collective].reduces else None,
            op,
            **reach,
            in_place=self.in_place,
            messages=self.plans.messages,
        )
        choice = choose(wish, request.algorithm)
        transposes = COLLECTIVES[request.collective].transposes  # then x is copied by `_untangle`
        wish = replace(wish, in_place=not transposes)  # on some rank, without the others knowing
        reached = self.always_direct or wish.may_be_direct(choice.algorithm)
        direct = reached and not self.plans.messages
        return replace(choice, direct=direct)


def choose(wish: SelectionRequest, algorithm: str | Algorithm | None) -> Choice:
    """Choose the algorithm of a call on device arrays; see `pycoll.runtime.selection.select`.

    Args:
        wish: What is wanted; an empty order stands for the default.
        algorithm: What the caller has named, or None. ``"native"`` is NCCL's own collective.

    Raises:
        ArgumentError: If nothing serves, or what was named does not.
    """
    if algorithm == NATIVE:
        return _native(wish)
    options = {
        "order": wish.order or None,
        "dtype": wish.dtype,
        "op": wish.op,
        "direct": wish.direct,
        "messages": wish.messages,
    }
    known = wish.collective, wish.nbytes, wish.n
    if algorithm is not None or wish.messages:
        return select(*known, algorithm=algorithm, **options)
    if COLLECTIVES[wish.collective].reduces:
        options["order"] = wish.order or "tree"
    row = _RULES[wish.collective]
    names = row.small if wish.nbytes <= _SMALL_BYTES and not wish.in_place else row.large
    for name in names[:-1]:
        try:
            return select(*known, algorithm=name, **options)
        except ArgumentError:
            continue
    return select(*known, algorithm=names[-1], **options)


def _native(wish: SelectionRequest) -> Choice:
    if not wish.messages:
        raise ArgumentError(
            "algorithm='native' stands for NCCL's own collectives; make the communicator with "
            "device_transport='nccl'"
        )
    if wish.order not in ("", "any"):
        raise ArgumentError(f"order={wish.order!r}: NCCL's own collectives promise no order")
    algorithm = Algorithm(wish.collective, NATIVE, _no_rounds, _one, _none, "any", True, True)
    return Choice(algorithm, {}, False, "any", "asked for by name", wish, Machine())


def _no_rounds(rank: Any, n: int) -> Iterator[Any]:
    return iter(())


def _one(n: int) -> int:
    return 1


def _none(n: int) -> int:
    return 0
