"""From measured times to choices: what replaces the default, and for which sizes."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pycoll.runtime.selection.tuning_table import TunedRule

GAIN = 0.05


def beats(challenger: Sequence[float], default: Sequence[float]) -> bool:
    """Tell whether an algorithm was faster than the default beyond noise.

    Both were measured in turn, in the same rounds. The challenger has to gain `GAIN` by the median,
    and all its rounds but the slowest have to be faster than all rounds of the default but the
    fastest: one disturbed round on either side decides nothing. Anything less keeps the default.
    Times are seconds of a call, round by round, three rounds or more.
    """
    gain = statistics.median(challenger) <= (1 - GAIN) * statistics.median(default)
    return gain and sorted(challenger)[-2] < sorted(default)[1]


@dataclass(frozen=True)
class Decision:
    """What follows from the measurements at one size; see `TunedRule`."""

    collective: str
    order: str
    symmetric: bool
    nbytes: int  # the size that was measured
    algorithm: str  # what beats the default; "" if nothing does
    seconds: float  # its median time
    default: str  # what is taken without measurement
    default_seconds: float

    @property
    def kind(self) -> tuple[str, str, bool]:
        """Which calls it is about, sizes apart."""
        return self.collective, self.order, self.symmetric


def between(small: int, large: int) -> int:
    """Return where one size becomes the other: the geometric mean."""
    return math.isqrt(small * large)


def rules_of(decisions: Iterable[Decision]) -> list[TunedRule]:
    """Join decisions at neighbouring sizes into lines of the table.

    A line reaches half-way, by ratio, to the next size at which something else was decided; below
    the smallest size that was measured to nothing, and above the largest by a factor of 1.4 only.
    """
    found: list[TunedRule] = []
    ordered = sorted(decisions, key=lambda d: (d.kind, d.nbytes))
    for _, group in itertools.groupby(ordered, key=lambda d: d.kind):
        row = list(group)
        low = 0
        for i, decision in enumerate(row):
            last = i + 1 == len(row)
            if not last and row[i + 1].algorithm == decision.algorithm:
                continue
            edge = decision.nbytes * math.sqrt(2)
            high = int(edge) if last else between(decision.nbytes, row[i + 1].nbytes)
            same = [d for d in row[: i + 1] if low <= d.nbytes]
            if decision.algorithm:
                found.append(_rule(same, low, high))
            low = high + 1
    return found


def _rule(same: list[Decision], low: int, high: int) -> TunedRule:
    best = min(same, key=lambda d: d.seconds / d.default_seconds)
    names = best.algorithm, best.seconds, best.default, best.default_seconds
    return TunedRule(*best.kind, low, high, *names)


def crossings(decisions: Iterable[Decision]) -> list[tuple[str, bool, int]]:
    """List the sizes half-way between neighbours that were decided differently, worth a look."""
    found = set()
    ordered = sorted(decisions, key=lambda d: (d.kind, d.nbytes))
    for a, b in itertools.pairwise(ordered):
        if a.kind == b.kind and a.algorithm != b.algorithm:
            found.add((a.collective, a.symmetric, between(a.nbytes, b.nbytes) // 8 * 8))
    return sorted(found)
