"""What ranks are given in a step: how many micro-batches, and whether they are any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel.engine.checks import gather_texts, ranks, told_by
from pycoll.parallel.engine.groups import Groups


def most_micro_batches(micro_batches: Any, groups: Groups, refused: str = "") -> int:
    """Return the largest number of micro-batches of a rank; a collective.

    Args:
        micro_batches: Those of this rank.
        groups: The ranks.
        refused: What else this rank cannot take a step with, in words.

    Raises:
        ArgumentError: On every rank, if any has something else or cannot take the step, or none
            has a micro-batch.
        MismatchError: On every rank, if those of a ``tp`` group have different numbers of them.
    """
    problem = refused or _problem(micro_batches)
    count = (-2 if refused else -1) if problem else len(micro_batches)
    counts = groups.world.gather_rows(np.array([count]), "count")[:, 0]
    if (counts < 0).any():
        told = told_by(gather_texts(problem, groups.world))
        if (counts >= -1).all():
            told += (
                "; expected a sequence of (inputs, targets), such as a list, with one pair for "
                "each micro-batch"
            )
        raise ArgumentError(f"the step was not taken: {told}")
    axes = groups.mesh.axes
    if "tp" in axes and np.ptp(counts.reshape(tuple(axes.values())), list(axes).index("tp")).any():
        told = "; ".join(f"{ranks(counts, n)}: {n}" for n in np.unique(counts))
        raise MismatchError(
            "the step was not taken: ranks of one tp group, which share their samples, have "
            f"different numbers of micro-batches: {told}"
        )
    if not counts.any():
        raise ArgumentError("no rank has a micro-batch")
    return int(counts.max())


def _problem(micro_batches: Any) -> str:
    """Tell what cannot be used, without taking anything from a sequence that may make it then."""
    kind = type(micro_batches).__name__
    sized = hasattr(micro_batches, "__len__") and hasattr(micro_batches, "__getitem__")
    if not sized or isinstance(micro_batches, (Mapping, str, bytes)):
        return f"a {kind} in place of micro-batches"
    if isinstance(micro_batches, (list, tuple)):
        for j, sample in enumerate(micro_batches):
            if not isinstance(sample, (list, tuple)):
                return f"a {type(sample).__name__} as micro-batch {j} of {len(micro_batches)}"
            if len(sample) < 2:
                return f"only {len(sample)} of two parts in micro-batch {j}"
    return ""
