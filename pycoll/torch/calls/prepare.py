"""From tensors to the engine: a collective is a kind, two addresses and a bound plan."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from pycoll import _C, algorithms
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.symmetric_memory import Memory, RegisteredPart
from pycoll.runtime.calls.plans import CallSpec, barrier_spec
from pycoll.runtime.calls.prepare import DIRECT_KINDS
from pycoll.runtime.calls.prepared import Prepared, chosen_spec
from pycoll.runtime.selection.select import select
from pycoll.runtime.sessions.session import Session
from pycoll.schedule.language.collectives import COLLECTIVES, FULL
from pycoll.torch.tensors.layout import (
    IN_PLACE,
    Request,
    Tensors,
    apart,
    as_reducible,
    code,
    source,
)
from pycoll.types import DType, Kind, ReduceOp

_LIBRARIES = ("torch.", "pycoll.", "deepspeed.", "lightning.", "accelerate.")
_WRAPPERS = ("contextlib.", "functools.", "typing_extensions.")
_MAX_BOUND, _MAX_LISTS = 4096, 256
_LEAST_LIST_BYTES = 4 << 20  # of a list at new addresses: to bind these takes longer than to copy
_LARGE = 1 << 20  # bytes that allocators take from the system each time
_HAS_ALL_BLOCKS = {
    Kind[name.upper()]: (promise.in_layout == FULL, promise.out_layout == FULL)
    for name, promise in COLLECTIVES.items()
}  # whether input and output hold the blocks of all ranks, or that of one
CallKey = tuple[Kind, int, int, ReduceOp | None, int, bool]
"""Kind, type code, count, operation and root of a call; whether it works on symmetric memory."""
_Place = tuple[int, RegisteredPart | None]  # address in symmetric memory; of what is registered


class CallSites:
    """Mixed into a session whose calls name the line of the program that called PyTorch.

    Attributes:
        call_site: Number of that line, for calls that go through `Session`.
    """

    internal: tuple[str, ...] = (*_LIBRARIES, *_WRAPPERS)
    call_site = 0

    def site(self) -> int:
        """Return the number of the caller's line."""
        return self.call_site


class GroupSession(CallSites, Session):
    """The session of a process group on one host."""


class Calls:
    """The collectives of a session on contiguous CPU tensors. For one thread at a time.

    Attributes:
        direct: Bound calls may be given to the engine as they are.
        symmetric: There are tensors in symmetric memory.
        order: Of reductions; see `pycoll.torch.Options`.
    """

    direct = True
    symmetric = False
    _barrier = "one_shot"  # the algorithm of a barrier

    def __init__(self, session: Session, order: str = "tree") -> None:
        """Serve a session."""
        self.session = session
        self.order = order
        self._bound: dict[tuple, Any] = {}
        self._direct: set[_C.BoundCall] = set()  # work on symmetric memory in place
        self.sites: CallSites | None = session.sites

    @property
    def symmetric_memory(self) -> Memory | None:
        """Where tensors of the user may be; None if there are none."""
        return self.session.memory if self.symmetric else None

    def empty(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Return a flat buffer for one call.

        A large one comes from the symmetric heap, whose pool reuses its pages: fresh pages cost
        more than the call that fills them. Not if the user has tensors in symmetric memory, because
        then a call is bound according to where its tensors are.
        """
        nbytes = count * like.element_size()
        if self.direct and not self.symmetric and nbytes >= _LARGE and like.is_cpu:
            with contextlib.suppress(MemoryError):
                block = self.session.memory.empty(nbytes, np.uint8)
                return torch.from_numpy(block).view(like.dtype)
        return like.new_empty(count)

    def pack(self, tensors: Tensors) -> torch.Tensor:
        """Copy tensors into a flat buffer, one behind the other."""
        parts = [source(tensor).reshape(-1) for tensor in tensors]
        return torch.cat(parts, out=self.empty(parts[0], sum(part.numel() for part in parts)))

    def run(self, request: Request, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        """Make a collective call.

        Args:
            request: The call.
            x: This rank's input, contiguous; None if it has none.
            out: Contiguous memory for its output; None if it has none.

        Raises:
            ArgumentError: Before anything is sent, if the type cannot be combined like that.
            CollError: As the collectives of `pycoll.Communicator` do.
        """
        kind, op, root, site, timeout_s = request
        typed = out if x is None else x
        type_code, size, dtype = code(typed.dtype), typed.element_size(), None
        if op is not None:
            x, dtype, op = as_reducible(x, op)
            size = dtype.itemsize
        if x is not None and kind not in IN_PLACE and not self.is_own_block(kind, x, out):
            x = self._apart(x, out, site)
        count = self._nbytes(request, x, out) // size
        places = self._symmetric_places(kind, x, out) if self.symmetric else None
        key = kind, type_code, count, op, root, places is not None
        bound = self.bind(key, size, dtype)
        self._run_at(bound, x, out, site, timeout_s, places)

    def _nbytes(self, request: Request, x: torch.Tensor | None, out: torch.Tensor | None) -> int:
        """Return the bytes of all blocks; if input and output differ, the peers get the error."""
        n, name = self.session.world_size, request.kind.name.lower()
        x_has_all, out_has_all = _HAS_ALL_BLOCKS[request.kind]
        given = None if x is None else x.nbytes * (1 if x_has_all else n)
        received = None if out is None else out.nbytes * (1 if out_has_all else n)
        if given is None or received is None:
            return received if given is None else given
        if given != received:
            expected = given if out_has_all else f"{given} / {n}"
            text = f"{name}: the output has {out.nbytes} bytes, expected {expected}"
            self.refuse(error := ArgumentError(text), request.site)
            raise error
        return given

    def refuse(self, error: Exception, site: int) -> None:
        """Take part in the call that the peers make, by refusing it with an error."""

        def fail() -> None:
            raise error

        self.session.call_site = site
        with contextlib.suppress(type(error)):
            self.session.refusing(fail)

    def _apart(self, x: torch.Tensor, out: torch.Tensor | None, site: int) -> torch.Tensor:
        """Return the input apart from the output; the peers get the error if memory is full."""
        self.session.call_site = site
        return self.session.refusing(lambda: apart(x, out, self.symmetric_memory))

    def is_own_block(self, kind: Kind, x: torch.Tensor, out: torch.Tensor | None) -> bool:
        """Whether the input of an all_gather is this rank's block of its output."""
        own = self.session.rank * x.nbytes
        return kind == Kind.ALL_GATHER and out.data_ptr() + own == x.data_ptr()

    def _symmetric_places(
        self, kind: Kind, x: torch.Tensor | None, out: torch.Tensor | None
    ) -> list[_Place] | None:
        """Return where input and output are in symmetric memory; None if one is not."""
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
            elif part := memory.locate(pointer, nbytes):
                found.append((part.address, part))
            else:
                return None
        return found

    def _run_at(
        self,
        bound: Any,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        site: int,
        timeout_s: float,
        places: list[_Place] | None,
    ) -> None:
        if places is None or bound not in self._direct:
            self._run_bound(bound, x, out, site, timeout_s)
            return
        registered = [part for _, part in places if part is not None]
        # A signal handler in the call has the lock of the group, too.
        held = self.session.memory.hold(registered) if registered else []
        try:
            for part in registered:
                part.gather()
            pointers = (pointer for pointer, _ in places)
            self.session.guard(self.session.engine.run, bound, *pointers, site, timeout_s)
            if places[1][1] is not None:
                places[1][1].scatter()
        finally:
            for hold in held:
                hold.end()

    def barrier(self, site: int, timeout_s: float) -> None:
        """Wait until every rank has made this call."""
        bound = self._bound.get((Kind.BARRIER,))
        if bound is None:
            spec = barrier_spec(algorithms.find("all_reduce", self._barrier))
            bound = self._bound[Kind.BARRIER,] = self._ready(spec)
        self._run_bound(bound, None, None, site, timeout_s)

    def _run_bound(self, bound: Any, x: Any, out: Any, site: int, timeout_s: float) -> None:
        pointers = [0 if t is None else t.data_ptr() for t in (x, out)]
        self.session.guard(self.session.engine.run, bound, *pointers, site, timeout_s)

    def bind(self, key: CallKey, itemsize: int, dtype: DType | None) -> Any:
        """Choose the algorithm of a call and bind its plan; quick for a call made before."""
        bound = self._bound.get(key)
        if bound is None and self.session.engine:  # raises after a close
            if len(self._bound) >= _MAX_BOUND:
                self._bound.clear()
                self._direct.clear()
            spec = self.spec(key, itemsize, dtype)
            bound = self._bound[key] = self._ready(spec)
            if spec.direct:
                self._direct.add(bound)
        return bound

    def spec(self, key: CallKey, itemsize: int, dtype: DType | None) -> CallSpec:
        """Choose the algorithm of a call; without a `dtype` elements are only moved."""
        kind, type_code, count, op, root, symmetric = key
        collective = kind.name.lower()
        operation = ReduceOp.SUM if op is None else op
        wanted = {"dtype": dtype, "op": operation, "direct": symmetric, "messages": not self.direct}
        if COLLECTIVES[collective].reduces:
            wanted["order"] = self.order
        call = collective, count * itemsize, self.session.world_size
        choice = select(*call, **wanted, crowded=self.session.plans.crowded)
        return chosen_spec(
            choice,
            True,
            kind=kind,
            collective=collective,
            dtype=type_code if dtype is None else int(dtype),
            caller_code=type_code,
            itemsize=itemsize,
            count=count,
            op=operation,
            root=root,
        )

    def _ready(self, spec: CallSpec) -> Any:
        return self.session.bind(spec, None)


class MultiHostCalls(Calls):
    """The collectives of a session on several hosts."""

    direct = False
    _barrier = "recursive_doubling"

    def _run_bound(self, bound: Any, x: Any, out: Any, site: int, timeout_s: float) -> None:
        """Run a bound call, as a two-level call where that is possible."""
        binding, spec = bound
        pointers = [0 if t is None else t.data_ptr() for t in (x, out)]
        prepared = Prepared(binding, *pointers, None, (x, out), spec=spec, two_levels=True)
        self.session.call_site = site
        self.session.start(prepared, timeout_s, False)

    def _ready(self, spec: CallSpec) -> Any:
        return self.session.bind(spec, None), spec


class ListCalls:
    """The all_gather, gather and scatter of a group whose tensors come in lists.

    To the peers such a call is like one on a flat tensor. Not so a scatter: peers cannot know where
    the root's tensors are, so it never has the alternative in which they read from there.
    """

    def __init__(self, calls: Calls) -> None:
        """Serve a group with its other calls."""
        self._calls = calls
        self._known: dict[tuple, Any] = {}  # None: such a list came once

    def wants(self, one: torch.Tensor) -> bool:
        """Tell whether this is for blocks like one; the answer is the same on every rank."""
        return self._calls.direct and one.is_cpu and one.numel() > 0

    def takes(self, kind: Kind, parts: Tensors, one: torch.Tensor, root: int) -> bool:
        """Tell whether the engine should read or write the blocks of all ranks in place.

        Args:
            kind: See `run`.
            parts: Contiguous tensors, one for each rank.
            one: This rank's block, contiguous; may be one of the parts.
            root: Root rank, or 0.
        """
        own, spans = _span(one), list(map(_span, parts))
        mine = spans[self._calls.session.rank] == own
        ordered = sorted(spans if mine else [*spans, own])
        alike = all(part.is_cpu and part.nbytes == one.nbytes for part in parts)
        apart = all(a[1] <= b[0] for a, b in pairwise(ordered))
        in_step = all((s[0] - ordered[0][0]) % one.element_size() == 0 for s in spans)
        if not (alike and apart and in_step):
            return False
        key = self._key(kind, one, parts, root)
        seen = key in self._known
        if not seen:
            self._know(key, None)
        return seen or one.nbytes * len(parts) >= _LEAST_LIST_BYTES

    def _key(self, kind: Kind, one: torch.Tensor, parts: Tensors | None, root: int) -> tuple:
        first, size = _first(parts), one.element_size()
        offsets = tuple((part.data_ptr() - first) // size for part in parts or ())
        return kind, code(one.dtype), one.numel(), root, offsets

    def _know(self, key: tuple, bound: Any) -> None:
        if len(self._known) >= _MAX_LISTS:
            self._known.clear()
        self._known[key] = bound

    def run(self, request: Request, one: torch.Tensor, parts: Tensors | None) -> None:
        """Run a call.

        Args:
            request: An ALL_GATHER, GATHER or SCATTER.
            one: This rank's block: its input, or for SCATTER its output.
            parts: The blocks of all ranks; None on a rank that has none.
        """
        kind, _, root, site, timeout_s = request
        first, key = _first(parts), self._key(kind, one, parts, root)
        bound = self._known.get(key)
        if bound is None:
            bound = self._bind(kind, one, root, key[-1])
            self._know(key, bound)
        ends = (first, one.data_ptr()) if kind == Kind.SCATTER else (one.data_ptr(), first)
        session = self._calls.session
        session.guard(session.engine.run, bound, *ends, site, timeout_s)

    def _bind(self, kind: Kind, one: torch.Tensor, root: int, offsets: tuple[int, ...]) -> Any:
        session, size = self._calls.session, one.element_size()
        count = one.numel() * session.world_size
        spec = self._calls.spec((kind, code(one.dtype), count, None, root, False), size, None)
        if kind == Kind.SCATTER:
            spec = replace(spec, alternative=None)
        return session.bind(spec, np.array(offsets) if offsets else None)


def _first(parts: Tensors | None) -> int:
    return min((part.data_ptr() for part in parts or ()), default=0)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
