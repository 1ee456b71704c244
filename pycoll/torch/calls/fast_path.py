"""Calls like earlier ones go from plain tensors straight to the engine.

What a call needs besides its addresses is bound when it is made for the first time. Where anything
about the tensors or the group is unusual, the call takes the way of a first one, which knows what
to do, or what to say.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pycoll import _C
from pycoll.torch.backend.core import Job
from pycoll.torch.backend.profiling import profiling
from pycoll.torch.calls.work import done
from pycoll.torch.tensors.layout import DTYPES
from pycoll.types import Kind, ReduceOp

_STRIDED = torch.strided
_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
_MAX_HOT = 1024
_Key = tuple[Kind, torch.dtype, int, ReduceOp | None, int]


def _is_there(view: torch.Tensor, held: int) -> bool:
    """Whether a view lies in the memory of its storage, of so many bytes, if there is any."""
    before = view.storage_offset() * view.element_size()
    return before + view.nbytes <= held and view.data_ptr() != before


def _address(x: torch.Tensor) -> int:
    """Return where the elements of a tensor are, one behind the other as they are; 0 otherwise."""
    if (
        x.layout is not _STRIDED
        or x.is_nested
        or not x.is_contiguous()
        or not x.is_cpu
        or x.is_neg()  # the sign is not in the memory
        or (held := x.untyped_storage().nbytes()) < x.nbytes  # some was freed
        or (x.storage_offset() and not _is_there(x, held))
    ):
        return 0
    return x.data_ptr()


def usual(op: dist.ReduceOp) -> ReduceOp | None:
    """Return the operation if it is one that training makes; its other ways of saying take long."""
    return ReduceOp.SUM if op == _SUM else ReduceOp.AVG if op == _AVG else None


class Hot:
    """Mixed into a process group."""

    def _open_hot(self) -> None:
        self._hot: dict[_Key, _C.AddressCall] = {}

    def _again(
        self, key: _Key, x: torch.Tensor | None, out: torch.Tensor, opts: Any
    ) -> dist.Work | None:
        """Run a synchronous call like an earlier one.

        Args:
            key: Its kind, the type and number of the elements of all its blocks, the operation
                or None, and the root.
            x: The input, which has been compared with the output; None where there is none.
            out: The output, or the input itself.
            opts: PyTorch's options of the call.

        Returns:
            The call's work, or None: nothing was done.
        """
        call = self._hot.get(key)
        if (
            call is None
            or opts.asyncOp
            or self._background.busy
            or self._calls.symmetric
            or profiling()
            or not (to := _address(out))
        ):
            return None
        if x is out:
            place = to
        elif x is None:
            place = 0
        elif not (place := _address(x)) or not self._are_apart(key[0], place, to, x, out):
            return None
        site, limit = self._calls.sites.here(), self._limit(opts)
        try:
            with self._lock:
                call(place, to, site, limit)
        except _C.EngineError as failure:
            error = self._session.error(*failure.args)
            raise self._error(error, key[0].name.lower()) from error
        return done([out])

    def _are_apart(self, kind: Kind, a: int, b: int, x: torch.Tensor, out: torch.Tensor) -> bool:
        apart = a + x.nbytes <= b or b + out.nbytes <= a
        return apart or self._calls.is_own_block(kind, x, out)

    def _kept(self, job: Job, key: _Key | None, like: torch.Tensor) -> Job:
        """Return a job after which calls like it need none.

        Args:
            job: The job.
            key: See `_again`; None if there are no calls like it.
            like: A tensor of the call.
        """
        if key is None or key[1] not in DTYPES or not like.is_cpu or not self._calls.direct:
            return job
        kind, dtype, count, op, root = key
        known = DTYPES[dtype]

        def whole() -> None:  # runs with the lock held
            job()
            if key not in self._hot and len(self._hot) < _MAX_HOT:
                how = op, root, None if op is None else known
                bound = self._calls.bind(kind, int(known), known.itemsize, count, *how)
                self._hot[key] = _C.AddressCall(self._session.engine, bound)

        return whole
