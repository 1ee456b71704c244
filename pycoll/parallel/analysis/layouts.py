"""The ways to divide a training run over ranks: a mesh, micro-batches, and what saves memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.parallel.analysis.workload import Workload
from pycoll.parallel.pipeline.registry import find

SCHEDULES = ("1f1b", "interleaved:2", "zb_h1")
AXES = ("replica", "dp", "cp", "pp", "tp")
CHOICES = (*AXES, "micro_batch", "zero", "recompute", "offload", "schedule")
OFFLOADS = ("none", "optimizer", "activations", "all")
MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Sizes of a micro-batch that are looked at, in sequences."""
ZERO = (0, 1, 2, 3)
RECOMPUTE = ("none", "selective", "full")
LONG = 4096
"""Tokens that a context-parallel rank has at least, unless ``cp`` is fixed."""


_VALUES: Mapping[str, tuple[Any, ...]] = {
    "micro_batch": MICRO_BATCHES,
    "zero": ZERO,
    "recompute": RECOMPUTE,
    "offload": OFFLOADS,
    "schedule": (*SCHEDULES, None),
}


@dataclass(frozen=True)
class Layout:
    """One way to divide a run.

    Attributes:
        mesh: Size of each axis, for `Mesh`; ``replica`` and ``cp`` are there if they are not 1.
        micro_batch: Sequences of a micro-batch.
        micro_batches: Micro-batches of a step on each rank.
        zero: ZeRO stage.
        recompute: What is computed again.
        schedule: Pipeline schedule; None: no pipeline.
        offload: What is kept outside of the rank's memory; see `Options`.
    """

    mesh: dict[str, int] = field(hash=False)
    micro_batch: int
    micro_batches: int
    zero: int
    recompute: str
    schedule: str | None
    offload: str = "none"

    def offloads(self, what: str) -> bool:
        """Tell whether the optimizer's states, or activations, are elsewhere."""
        return self.offload in (what, "all")

    def size(self, *axes: str) -> int:
        """Return the number of ranks along some axes."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    @property
    def choices(self) -> dict[str, Any]:
        """What is chosen, by the names of `CHOICES`."""
        axes = {axis: self.size(axis) for axis in AXES}
        return axes | {name: getattr(self, name) for name in CHOICES[len(AXES) :]}

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `DataParallel`, or with a pipeline of `Pipeline`.

        Sums are in any order, which keeps fewer of them than the tree does.
        """
        found = {"zero": self.zero, "recompute": self.recompute, "order": "any"}
        if self.offload != "none":
            found["offload"] = self.offload
        if self.schedule is None:
            return found
        return {**found, "schedule": self.schedule, "micro_batches": self.micro_batches}


def check_fixed(fixed: Mapping[str, Any], offload: bool) -> None:
    """Refuse names that nothing can be fixed by, and values that no layout has.

    Args:
        fixed: Values by name.
        offload: Whether there is memory to offload to.

    Raises:
        ArgumentError: With those that are known.
    """
    if odd := sorted(fixed.keys() - set(CHOICES)):
        raise ArgumentError(f"fixed: there is no {odd[0]!r} to fix; known: {', '.join(CHOICES)}")
    for name, accepted in _VALUES.items():
        if name in fixed and fixed[name] not in accepted:
            listed = ", ".join(map(str, accepted))
            raise ArgumentError(f"fixed: no layout has {name}={fixed[name]!r}; accepted: {listed}")
    if not offload and fixed.get("offload", "none") != "none":
        raise ArgumentError(
            f"fixed: offload={fixed['offload']!r} needs the speed of the memory that things go to: "
            "--host, or Speed(host_bytes=...)"
        )


@dataclass(frozen=True)
class Space:
    """All layouts of one run.

    Attributes:
        work: What is trained.
        ranks: Number of ranks.
        near: Number of consecutive ranks that are close to each other.
        batch: Sequences of a step, over all ranks.
        offload: Whether there is memory to offload to.
        fixed: What is chosen already, by the names of `CHOICES`.
    """

    work: Workload
    ranks: int
    near: int
    batch: int
    offload: bool
    fixed: Mapping[str, Any]

    def layouts(self) -> Iterator[tuple[int, Layout]]:
        """Yield those with what is fixed, numbered: of equal ones the simplest comes first."""
        found = (Layout(*each) for mesh in self.meshes() for each in self._of_mesh(mesh))
        for number, layout in enumerate(found):
            if self.fixed.items() <= layout.choices.items():
                yield number, layout

    def meshes(self) -> Iterator[dict[str, int]]:
        """Yield all meshes."""
        work, n = self.work, self.ranks
        for tp in (t for t in _divisors(n) if not (work.heads % t or work.vocabulary % t)):
            for pp in (p for p in _divisors(n // tp) if p <= work.layers):
                for cp in filter(self._divides_context, _divisors(n // (tp * pp))):
                    data = n // (tp * pp * cp)
                    for dp in (
                        d for d in _divisors(data)[::-1] if self._shards(d, data, tp * pp * cp)
                    ):
                        axes = {"replica": data // dp, "dp": dp, "cp": cp, "pp": pp, "tp": tp}
                        yield {a: s for a, s in axes.items() if s > 1 or a in ("dp", "pp", "tp")}

    def _divides_context(self, cp: int) -> bool:
        part, rest = divmod(self.work.sequence, 2 * cp)  # a rank has two pieces
        return cp == 1 or (not rest and (2 * part >= LONG or self.fixed.get("cp", 1) > 1))

    def _shards(self, dp: int, data: int, inner: int) -> bool:
        """Tell whether ``dp`` of ``data`` ranks may share states: all, or those that are near."""
        if dp == data or self.fixed.get("replica", 1) > 1:
            return True
        return dp > 1 and dp * inner == self.near

    def _of_mesh(self, mesh: dict[str, int]) -> Iterator[tuple[Any, ...]]:
        """Yield the rest of each layout of a mesh."""
        replicas, pp = mesh.get("replica", 1), mesh["pp"]
        data, sharding = replicas * mesh["dp"], mesh["dp"] * mesh.get("cp", 1)
        stages = ZERO[1:] if replicas > 1 else ZERO if sharding > 1 else (0,)
        for micro in (b for b in MICRO_BATCHES if self.batch % (data * b) == 0):
            m = self.batch // (data * micro)
            for schedule in SCHEDULES if pp > 1 else (None,):
                if not self._possible(schedule, pp, m):
                    continue
                for recompute in RECOMPUTE:
                    for zero in stages:
                        for offload in OFFLOADS if self.offload else OFFLOADS[:1]:
                            yield mesh, micro, m, zero, recompute, schedule, offload

    def _possible(self, schedule: str | None, pp: int, m: int) -> bool:
        if schedule is None:
            return True
        chosen = find(schedule)
        return m >= max(pp, chosen.least(pp)) and pp * chosen.chunks <= self.work.layers


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
