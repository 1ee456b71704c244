"""A collective of virtual ranks, prepared once to be launched many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll.config import check_timeout
from pycoll.cuda.device.arrays import stream_of
from pycoll.cuda.device.library import library
from pycoll.errors import ArgumentError
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.calls.prepared import CallRequest, Prepared
from pycoll.schedule.language.collectives import COLLECTIVES, OWN
from pycoll.types import Kind

if TYPE_CHECKING:
    from pycoll.cuda.calls.virtual import VirtualRanks

TIMEOUT_S = 60.0


def kind_of(collective: str | Kind) -> Kind:
    """Return the kind of a collective of that name."""
    name = collective if isinstance(collective, str) else collective.name.lower()
    if name not in COLLECTIVES:
        known = ", ".join(COLLECTIVES)
        raise ArgumentError(f"collective={collective!r} is not known; accepted: {known}")
    return Kind[name.upper()]


def root_only(request: CallRequest) -> bool:
    """Tell whether only the root has a result."""
    return COLLECTIVES[request.collective].out_at_root


def check_apart(prepared: Sequence[Prepared], n: int) -> None:
    """Refuse an output that shares memory with an array of another rank.

    Raises:
        ArgumentError: Naming the two ranks.
    """
    spec = prepared[0].spec
    promise = COLLECTIVES[spec.collective]
    sizes = [
        spec.count * spec.itemsize // (n if layout == OWN else 1)
        for layout in (promise.in_layout, promise.out_layout)
    ]
    starts = np.array([(p.in_ptr, p.out_ptr) for p in prepared], np.uint64).astype(np.int64)
    ends = np.where(starts > 0, starts + sizes, starts)
    low, high = starts[:, 1], ends[:, 1]
    for other in (0, 1):
        first, last = starts[:, other], ends[:, other]
        shared = (low[:, None] < last[None]) & (first[None] < high[:, None])
        np.fill_diagonal(shared, False)
        if shared.any():
            a, b = np.argwhere(shared)[0].tolist()
            raise ArgumentError(f"the output of rank {a} overlaps an array of rank {b}")


class Launch:
    """A collective on given arrays of virtual ranks, ready to be launched many times."""

    def __init__(
        self,
        ranks: VirtualRanks,
        prepared: list[Prepared],
        stream: Any,
        results: Any,
        repeatable: bool,
    ) -> None:
        """Keep what is needed; see `VirtualRanks.bind`."""
        self._launch: Callable[..., None] = ranks.launch
        self._prepared, self._results = prepared, results
        self._repeatable, self._launched = repeatable, False
        self._stream, self._alive = stream_of(stream), stream
        self.spec: CallSpec = prepared[0].spec

    def __call__(self, limit: float = TIMEOUT_S, **options: Any) -> Any:
        """Launch it once and return the results; ``options`` are those of `VirtualRanks.launch`."""
        limit = check_timeout(limit)
        stream = stream_of(options.pop("stream")) if "stream" in options else self._stream
        if self._launched and not self._repeatable:
            raise ArgumentError("an input is not contiguous; such a call can be launched once")
        for copy in (c for p in self._prepared for c in p.gathers if self._launched):
            library().copy(copy.address, copy.given.pointer, copy.given.array.nbytes, stream)
        self._launch(self._prepared, stream, limit, **options)
        self._launched = True
        return self._results
