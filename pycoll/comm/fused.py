"""all_reduce together with what follows it in a transformer: a part of a communicator."""

from __future__ import annotations

from typing import Any

from pycoll.runtime.arrays.host_arrays import new_like, on_device, view
from pycoll.runtime.arrays.rms_norm import (
    NormArrays,
    check_eps,
    check_norm,
    check_order,
    normalise,
)
from pycoll.runtime.calls.methods import reports_misuse
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind


class FusedCalls:
    """The methods of `pycoll.Communicator` that are more than one collective."""

    _session: Session

    @reports_misuse
    def all_reduce_rms_norm(
        self,
        x: Any,
        weight: Any,
        residual: Any = None,
        eps: float = 1e-6,
        *,
        out: Any = None,
        residual_out: Any = None,
        order: str | None = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Add the rows of all ranks, add a residual, and normalise by the root mean square.

        ``h = sum of x + residual; y = h / sqrt(mean(h * h) + eps) * weight`` for each row. The sum
        is that of `all_reduce`, rounded to the type; so is h; y is made from the rounded h in
        float32, and rounded. The order of the sum in the mean is fixed, and depends on ``hidden``
        alone: docs/cuda.md. So bits depend on nothing but the inputs, and are the same for arrays
        on the CPU, on devices, and of `pycoll.VirtualRanks`.

        Only ``x`` is compared between ranks. The results are the same on all of them if
        ``weight``, ``residual`` and ``eps`` are.

        Args:
            x: Rows, ``[..., hidden]``, of float32, float16 or bfloat16.
            weight: ``[hidden]``, of the same type, as all arrays are.
            residual: Array of the shape of ``x``, or None.
            eps: Added to the mean.
            out: Array for y; ``out=x`` works in place.
            residual_out: Array for h, with a residual; it may be ``residual``.
            order: Of the sum over ranks: ``tree``, the default, or ``rank``.
            timeout: See the class.
            stream: See the class.

        Returns:
            y; with a residual y and h.
        """
        rest = weight, residual, eps, out, residual_out, order
        if stream is not None or on_device(x):
            return self._on_device(x, *rest, timeout, stream)
        return self._on_host(x, *rest, timeout)

    def _on_device(
        self,
        x: Any,
        weight: Any,
        residual: Any,
        eps: float,
        out: Any,
        residual_out: Any,
        order: str | None,
        timeout: float | None,
        stream: Any,
    ) -> Any:
        session = self._session
        side = session.refusing(lambda: session.device_side(x))
        given = x, weight, residual, eps, out, residual_out, order, stream
        session.refusing(lambda: side.check_norm(*given))
        call = Kind.ALL_REDUCE, x, out, "sum", 0, order or "tree", None, timeout
        s = session.call(*call, stream=stream)
        return side.normalise(s, weight, residual, eps, residual_out, stream)

    def _on_host(
        self,
        x: Any,
        weight: Any,
        residual: Any,
        eps: float,
        out: Any,
        residual_out: Any,
        order: str | None,
        timeout: float | None,
    ) -> Any:
        def prepare() -> tuple[NormArrays, Any]:
            check_eps(eps)
            check_order(order)
            found = check_norm(view, x, weight, residual, out, residual_out)
            makes = residual is not None and residual_out is None
            return found, new_like(found.x, tuple(found.x.array.shape)) if makes else residual_out

        session = self._session
        found, h = session.refusing(prepare)
        s = session.call(Kind.ALL_REDUCE, x, out, "sum", 0, order or "tree", None, timeout)
        total = view(s, "out")
        kept = None if h is None else view(h, "residual_out")
        normalise(found._replace(out=total, residual_out=kept), total, eps)
        return s if residual is None else (s, h)
