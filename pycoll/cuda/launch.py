"""A collective of virtual ranks, prepared once to be launched many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycoll.cuda.library import library
from pycoll.errors import ArgumentError
from pycoll.runtime.plans import CallSpec
from pycoll.runtime.prepared import Prepared

if TYPE_CHECKING:
    from pycoll.cuda.virtual import VirtualRanks

TIMEOUT_S = 60.0


class Launch:
    """A collective on given arrays of virtual ranks, ready to be launched many times."""

    def __init__(
        self,
        ranks: VirtualRanks,
        prepared: list[Prepared],
        stream: int,
        results: Any,
        repeatable: bool,
    ) -> None:
        """Keep what is needed; see `VirtualRanks.bind`."""
        self._launch: Callable[..., None] = ranks.launch
        self._prepared, self._stream, self._results = prepared, stream, results
        self._repeatable, self._launched = repeatable, False
        self.spec: CallSpec = prepared[0].spec

    def __call__(self, limit: float = TIMEOUT_S, **options: Any) -> Any:
        """Launch it once and return the results; ``options`` are those of `VirtualRanks.launch`."""
        stream = options.pop("stream", self._stream)
        if self._launched and not self._repeatable:
            raise ArgumentError("an input is not contiguous; such a call can be launched once")
        for copy in (c for p in self._prepared for c in p.gathers if self._launched):
            library().copy(copy.address, copy.given.pointer, copy.given.array.nbytes, stream)
        self._launch(self._prepared, stream, limit, **options)
        self._launched = True
        return self._results
