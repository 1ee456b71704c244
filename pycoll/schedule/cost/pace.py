"""The same round many times over: only ranks off the common pace are looked at.

In most of the many rounds of a ring all ranks go on at one pace. A rank keeps it if in the round
before it did, and those that it hears from did. So after a few rounds of all ranks it is enough to
follow the others: the ranks that a late one holds up, or those behind a slow link.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

_EPS = float(np.finfo(float).eps)
_FEW = 16  # of so many ranks one at most may be off the pace


class Step(Protocol):
    """A round as `advance_alike` needs it."""

    def advance(self, before: np.ndarray) -> np.ndarray:
        """Return the times of all ranks after the round."""
        ...

    def heard(self) -> list[np.ndarray] | None:
        """Return, for each message, who gets that of each rank, ``[n]``; None if that differs."""
        ...

    def some(self, before: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Return the times of some ranks after the round."""
        ...


def advance_alike(step: Step, time: np.ndarray, times: int) -> np.ndarray:
    """Return the times of all ranks after the same round has come so many times."""
    heard = step.heard() if times > _FEW else None
    done = 0
    while times:
        before, time = time, step.advance(time)
        times, done = times - 1, done + 1
        if heard is None or times == 0 or (done & (done - 1) and done % 64):
            continue  # looking costs as much as going on
        pace, off = _off_pace(before, time)
        if len(off) * _FEW <= len(time):
            time, times = _follow(step, time, times, pace, off, heard)
    return time


def _off_pace(before: np.ndarray, after: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the usual time of a round, and the ranks that took another one."""
    finite = np.isfinite(after)
    taken = np.subtract(after, before, out=np.zeros(len(after)), where=finite)
    pace = float(np.median(taken[finite])) if finite.any() else 0.0
    off = np.abs(taken - pace) > _tolerance(after[finite], pace)
    return pace, np.flatnonzero(np.where(finite, off, np.isfinite(before)))


def _tolerance(time: np.ndarray, pace: float) -> float:
    return max(1e-12 * pace, 8 * _EPS * float(np.abs(time).max(initial=0.0)))


def _follow(
    step: Step,
    time: np.ndarray,
    times: int,
    pace: float,
    off: np.ndarray,
    heard: list[np.ndarray],
) -> tuple[np.ndarray, int]:
    """Follow the ranks off the pace until there are none, or many; return what is left to do."""
    time, done = time.copy(), 0  # against the pace: what the round adds for all is left out
    tolerance = _tolerance(time[np.isfinite(time)], pace)
    with np.errstate(invalid="ignore"):  # ranks that wait for ever, before and after
        while done < times and len(off) and len(off) * _FEW <= len(time):
            ranks = np.unique(np.concatenate([off, *(to[off] for to in heard)]))
            now, old = step.some(time, ranks) - pace, time[ranks]
            same = (now == old) | (np.abs(now - old) <= tolerance)
            time[ranks] = now
            off = ranks[~same]
            done += 1
    done = done if len(off) else times
    return time + pace * done, times - done
