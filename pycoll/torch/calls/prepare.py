"""From tensors to the engine: every call a kind of collective, two addresses and a bound plan."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from pycoll import _C, algorithms
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.symmetric_memory import Mirror
from pycoll.runtime.calls.plans import CallSpec, barrier_spec
from pycoll.runtime.calls.prepare import DIRECT_KINDS
from pycoll.runtime.calls.prepared import Prepared, with_alternative
from pycoll.runtime.selection.select import select
from pycoll.runtime.sessions.session import Session
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.torch.calls.call_sites import Placed
from pycoll.torch.calls.list_calls import Listed
from pycoll.torch.operations.arguments import check_memory
from pycoll.torch.tensors.layout import apart, as_reducible, code
from pycoll.types import DType, Kind, Order, ReduceOp

_MAX_BOUND = 4096
_IN_PLACE = (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE)
_Place = tuple[int, Mirror | None]  # address in symmetric memory; of what is registered


class GroupSession(Placed, Session):
    """The session of a process group on one host."""


class Calls:
    """The collectives of a session on contiguous CPU tensors. For one thread at a time.

    Attributes:
        direct: Bound calls may be given to the engine as they are.
        symmetric: There are tensors in symmetric memory.
        listed: The calls on lists of tensors.
    """

    direct = True
    symmetric = False

    def __init__(self, session: Session) -> None:
        """Serve a session."""
        self.session = session
        self._bound: dict[tuple, Any] = {}
        self._direct: set[_C.BoundCall] = set()  # work on symmetric memory in place
        self.sites = session.sites
        self.listed = Listed(self)

    def reduce(
        self,
        kind: Kind,
        x: torch.Tensor,
        out: torch.Tensor | None,
        op: ReduceOp,
        root: int,
        site: int,
        timeout_s: float,
    ) -> None:
        """Combine the tensors of all ranks.

        Args:
            kind: ALL_REDUCE, REDUCE or REDUCE_SCATTER.
            x: This rank's elements, contiguous.
            out: Contiguous memory for the result; None where there is none.
            op: The operation.
            root: Rank with the result, or 0.
            site: Number of the place in the program that made the call.
            timeout_s: Longest time to wait for the peers.

        Raises:
            ArgumentError: Before anything is sent, if the type cannot be combined like that.
            CollError: As the collectives of `pycoll.Communicator` do.
        """
        told = code(x.dtype)
        x, dtype, op = as_reducible(x, op)
        if kind not in _IN_PLACE:
            x = self._apart(x, out, site)
        self._check(kind, x, out, x.nbytes, site)
        mirrors = self._mirrors(kind, x, out) if self.symmetric else None
        bound = self.bind(
            kind, told, dtype.itemsize, x.numel(), op, root, dtype, mirrors is not None
        )
        self._run(bound, x, out, site, timeout_s, mirrors)

    def move(
        self,
        kind: Kind,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        count: int,
        root: int,
        site: int,
        timeout_s: float,
    ) -> None:
        """Move elements between ranks.

        Args:
            kind: BROADCAST, ALL_GATHER, GATHER, SCATTER or ALL_TO_ALL.
            x: This rank's input, contiguous; None where there is none.
            out: Contiguous memory for the output; None where there is none.
            count: Elements of the whole: of all blocks together.
            root: Root rank, or 0.
            site: See `reduce`.
            timeout_s: See `reduce`.
        """
        typed = out if x is None else x
        if x is not None and kind not in _IN_PLACE and not self.is_own_block(kind, x, out):
            x = self._apart(x, out, site)
        mirrors = self._mirrors(kind, x, out) if self.symmetric else None
        size, number = typed.element_size(), code(typed.dtype)
        self._check(kind, x, out, count * size, site)
        bound = self.bind(kind, number, size, count, None, root, None, mirrors is not None)
        self._run(bound, x, out, site, timeout_s, mirrors)

    def _check(
        self, kind: Kind, x: torch.Tensor | None, out: torch.Tensor | None, nbytes: int, site: int
    ) -> None:
        """Compare memory with what will be moved; tell the peers if it does not fit."""
        try:
            check_memory(kind, x, out, nbytes, self.session.world_size)
        except ArgumentError as error:
            self.refuse(error, site)
            raise

    def refuse(self, error: Exception, site: int) -> None:
        """Take part in the call that the peers make by telling them that it cannot be made."""

        def again() -> None:
            raise error

        self.session.place = site
        with contextlib.suppress(type(error)):
            self.session.refusing(again)

    def _apart(self, x: torch.Tensor, out: torch.Tensor | None, site: int) -> torch.Tensor:
        """Return the input in memory of its own; tell the peers if there is none."""
        self.session.place = site
        memory = self.session.memory if self.symmetric else None
        return self.session.refusing(lambda: apart(x, out, memory))

    def is_own_block(self, kind: Kind, x: torch.Tensor, out: torch.Tensor | None) -> bool:
        """Whether the input of an all_gather lies where its output is to be."""
        own = self.session.rank * x.nbytes
        return kind == Kind.ALL_GATHER and out.data_ptr() + own == x.data_ptr()

    def _mirrors(
        self, kind: Kind, x: torch.Tensor | None, out: torch.Tensor | None
    ) -> list[_Place] | None:
        """Return where input and output lie in symmetric memory; None if they do not."""
        if kind not in DIRECT_KINDS:
            return None
        memory, found = self.session.memory, []
        for tensor in (x, out):
            if tensor is None:
                found.append((0, None))
                continue
            pointer, nbytes = tensor.data_ptr(), tensor.nbytes
            if memory.heap.contains(pointer, nbytes):
                found.append((pointer, None))
            elif mirror := memory.locate(pointer, nbytes):
                found.append((mirror.address, mirror))
            else:
                return None
        return found

    def _run(
        self,
        bound: Any,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        site: int,
        timeout_s: float,
        mirrors: list[_Place] | None,
    ) -> None:
        if mirrors is None or bound not in self._direct:
            self.run(bound, x, out, site, timeout_s)
            return
        registered = [mirror for _, mirror in mirrors if mirror is not None]
        # A signal handler in the call has the lock of the group, too.
        held = self.session.memory.hold(registered) if registered else []
        try:
            for mirror in registered:
                mirror.gather()
            pointers = (pointer for pointer, _ in mirrors)
            self.session.guard(self.session.engine.run, bound, *pointers, site, timeout_s)
            if mirrors[1][1] is not None:
                mirrors[1][1].scatter()
        finally:
            for hold in held:
                hold.end()

    def barrier(self, site: int, timeout_s: float) -> None:
        """Wait until every rank has made this call."""
        bound = self._bound.get((Kind.BARRIER,))
        if bound is None:
            bound = self._bound[Kind.BARRIER,] = self._barrier()
        self.run(bound, None, None, site, timeout_s)

    def run(self, bound: Any, x: Any, out: Any, site: int, timeout_s: float) -> None:
        """Run a bound call."""
        x_ptr = 0 if x is None else x.data_ptr()
        out_ptr = 0 if out is None else out.data_ptr()
        self.session.guard(self.session.engine.run, bound, x_ptr, out_ptr, site, timeout_s)

    def bind(
        self,
        kind: Kind,
        type_code: int,
        itemsize: int,
        count: int,
        op: ReduceOp | None,
        root: int,
        dtype: DType | None,
        mapped: bool = False,
    ) -> Any:
        """Choose the algorithm of a call and bind its plan; quick for a call made before."""
        key = (kind, type_code, count, op, root, mapped)
        bound = self._bound.get(key)
        if bound is None and self.session.engine:  # raises after a close
            if len(self._bound) >= _MAX_BOUND:
                self._bound.clear()
                self._direct.clear()
            bound = self._bound[key] = self._bind(*key, itemsize, dtype)
        return bound

    def _bind(self, *call: Any) -> Any:
        spec = self.spec(*call)
        bound = self._ready(spec)
        if spec.direct:
            self._direct.add(bound)
        return bound

    def spec(
        self,
        kind: Kind,
        type_code: int,
        count: int,
        op: ReduceOp | None,
        root: int,
        mapped: bool,
        itemsize: int,
        dtype: DType | None,
    ) -> CallSpec:
        """Choose the algorithm of a call; the arguments are those of `bind`."""
        collective = kind.name.lower()
        operation = ReduceOp.SUM if op is None else op
        size, wanted = self.session.world_size, {"dtype": dtype, "op": operation, "direct": mapped}
        wanted |= {"messages": not self.direct, "crowded": self.session.plans.crowded}
        choice = select(collective, count * itemsize, size, **wanted)
        params = dict(choice.params)
        if "root" in choice.algorithm.params:
            params["root"] = root
        spec = CallSpec(
            kind=kind,
            collective=collective,
            algorithm=choice.algorithm,
            params=tuple(sorted(params.items())),
            direct=choice.direct,
            dtype=type_code if dtype is None else int(dtype),
            caller_code=type_code,
            itemsize=itemsize,
            count=count,
            op=operation,
            order=Order[(choice.order or "any").upper()],
            root=root if COLLECTIVES[collective].rooted else 0,
        )
        return with_alternative(spec, choice)

    def _barrier(self) -> Any:
        return self._ready(barrier_spec(algorithms.find("all_reduce", "one_shot")))

    def _ready(self, spec: CallSpec) -> Any:
        return self.session.bind(spec, None)


class HostCalls(Calls):
    """The collectives of a session on several hosts."""

    direct = False

    def run(self, bound: Any, x: Any, out: Any, site: int, timeout_s: float) -> None:
        """Run a bound call, inside hosts first where that is possible."""
        binding, spec = bound
        pointers = [0 if t is None else t.data_ptr() for t in (x, out)]
        prepared = Prepared(binding, *pointers, None, (x, out), spec=spec, two_levels=True)
        self.session.place = site
        self.session.start(prepared, timeout_s, False)

    def _barrier(self) -> Any:
        return self._ready(barrier_spec(algorithms.find("all_reduce", "recursive_doubling")))

    def _ready(self, spec: CallSpec) -> Any:
        return self.session.bind(spec, None), spec
