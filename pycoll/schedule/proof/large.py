"""Proofs of large worlds: by symmetry where there is one, else by running chunks on all ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pycoll.schedule.ir import Schedule
from pycoll.schedule.proof.columns import check_columns
from pycoll.schedule.proof.symmetry import prove_symmetric, rotational

WHOLE = 256
"""Worlds up to this size are proven whole: the plans of all ranks, in every mode."""


@dataclass(frozen=True)
class LargeProof:
    """What is known of a schedule of many ranks."""

    schedule: Schedule
    how: str  # "symmetry": plans over messages; "all chunks" or "16 of 4096 chunks": the schedule
    rounds: int  # number of rounds
    bytes_sent: float  # most bytes that leave a rank, as a fraction of the full vector
    order: str  # ``"tree"``, ``"rank"`` or ``"any"``; ``""`` if nothing is reduced
    roundings: int  # largest number of folds on the way from an input to an output
    seconds: float  # processor time the proof took


def prove_large(schedule: Schedule) -> LargeProof:
    """Prove a schedule of any number of ranks as far as that goes; the result says how far.

    Raises:
        ScheduleError: Naming schedule, round and piece; or if it is too large.
    """
    started = time.process_time()
    order = schedule.algorithm.order
    if rotational(schedule) and order in ("", "any"):
        found = prove_symmetric(schedule)
        how, sent = "symmetry", found.sent / schedule.chunks
        rounds, roundings = found.rounds, found.roundings
    else:
        checked = check_columns(schedule)
        whole = checked.chunks == schedule.chunks
        how = "all chunks" if whole else f"{checked.chunks} of {schedule.chunks} chunks"
        order = "tree" if order == "any" and checked.tree and whole else order
        rounds, roundings, sent = checked.rounds, checked.roundings, checked.sent
    seconds = time.process_time() - started
    return LargeProof(schedule, how, rounds, sent, order, roundings, seconds)
