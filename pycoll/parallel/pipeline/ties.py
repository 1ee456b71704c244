"""Parameters that layers on several stages share: a copy of its own for each, one gradient.

Each layer that uses a tied parameter has a copy in a bucket of its own, with gradient and states.
The gradient of every copy is reduced as usual; then the stage of the owner adds them up, in the
order of the layers, and tells the others the sum. All copies start from the same values and take
the same step, so they stay the same. In the norm the owner counts alone.

So each use is added over micro-batches and ranks, and then the uses are added: the same bits for
every schedule and every number of stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pycoll.parallel.nn.layer import ParameterSpec
from pycoll.parallel.pipeline.transfers import Transfers
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.layout import Unit

_TAG = 1 << 30


@dataclass(frozen=True)
class _Copy(Unit):
    """A layer whose tied parameters are its own.

    Attributes:
        copied: Their specifications, by full name.
    """

    copied: Mapping[str, ParameterSpec]

    @property
    def specs(self) -> dict[str, ParameterSpec]:
        return {**super().specs, **self.copied}


def untie(units: Sequence[Unit]) -> tuple[list[Unit], dict[str, str]]:
    """Give every layer copies of the parameters that it shares.

    Returns:
        The units, and for each copy the full name of its owner.
    """
    specs = {name: spec for unit in units for name, spec in unit.specs.items()}
    found, ties = [], {}
    for unit in units:
        own = {f"{unit.name}.{local}": full for local, full in unit.names.items()}
        tied = {name: full for name, full in own.items() if name != full}
        if not tied:
            found.append(unit)
            continue
        copied = {name: specs[full] for name, full in tied.items()}
        names = {local: f"{unit.name}.{local}" for local in unit.names}
        found.append(_Copy(unit.name, unit.layer, names, unit.takes_out, copied))
        ties |= tied
    return found, ties


@dataclass(frozen=True)
class Tie:
    """The copies of one parameter.

    Attributes:
        owner: Full name of the parameter.
        stages: The stage of every copy, the owner's first.
        own: The buckets of the copies that this stage has, by their place in `stages`.
        number: Which tie of the model it is.
        stage: This stage.
    """

    owner: str
    stages: tuple[int, ...]
    own: dict[int, Bucket]
    number: int
    stage: int

    @property
    def _others(self) -> list[int]:
        return sorted({stage for stage in self.stages if stage != self.stages[0]})

    def _tag(self, place: int) -> int:
        return _TAG | (self.number << 8 | place) << 1

    def begin(self, transfers: Transfers) -> None:
        """Give all copies the values of the owner."""
        for what in ("parameter", "master"):
            vectors = {place: _vector(bucket, what) for place, bucket in self.own.items()}
            if any(vector is not None for vector in vectors.values()):
                self._spread(vectors, vectors.get(0), transfers)

    def join(self, transfers: Transfers) -> Iterator[Bucket]:
        """Add the reduced gradients of all copies; yield the owner's bucket, where it is."""
        results = {place: bucket.gradients.result for place, bucket in self.own.items()}
        total = results.get(0)
        if total is not None:
            for place, stage in list(enumerate(self.stages))[1:]:
                if stage == self.stage:
                    total += results[place]
                else:
                    total += transfers.receive(stage, self._tag(place), "tied")[0]
        else:
            for place, result in results.items():
                transfers.send(result, self.stages[0], self._tag(place), purpose="tied")
        self._spread(results, total, transfers)
        if 0 in self.own:
            yield self.own[0]

    def _spread(self, vectors: dict[int, Any], value: Any, transfers: Transfers) -> None:
        """Set the vectors of all copies to the owner's."""
        if value is not None:
            for stage in self._others:
                transfers.send(value, stage, self._tag(0), purpose="tied")
        else:
            value = transfers.receive(self.stages[0], self._tag(0), "tied")[0]
        for vector in vectors.values():
            if vector is not value:
                vector[...] = value


def _vector(bucket: Bucket, what: str) -> Any:
    return bucket.complete.wait() if what == "parameter" else bucket.master


def make_ties(
    ties: Mapping[str, str],
    stages: Mapping[str, int],
    buckets: Mapping[str, Bucket],
    stage: int,
) -> list[Tie]:
    """Return the ties of which a stage has a copy, in an order that is the same on all stages.

    Args:
        ties: The owner of each copy, in the order of the layers.
        stages: The stage of every parameter.
        buckets: The buckets of the tied parameters of this stage, by full name.
        stage: This stage.
    """
    found = []
    for number, owner in enumerate(sorted(set(ties.values()))):
        names = [owner, *(copy for copy, other in ties.items() if other == owner)]
        own = {i: buckets[name] for i, name in enumerate(names) if name in buckets}
        if own:
            places = tuple(stages[name] for name in names)
            found.append(Tie(owner, places, own, number, stage))
    return found


def with_copies(saved: Mapping[str, Any], ties: Mapping[str, str]) -> dict[str, Any]:
    """Return saved values with those of the copies."""
    return {**saved, **{copy: saved[own] for copy, own in ties.items() if own in saved}}
