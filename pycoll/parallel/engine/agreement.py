"""What all ranks decide together at the end of a step: the norm, and whether to take it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from pycoll import kernels
from pycoll.errors import ArgumentError
from pycoll.parallel.engine.checks import check_unanimous, gather_texts, told_by, vote
from pycoll.parallel.engine.groups import Groups
from pycoll.parallel.state.bucket import Bucket


def agree(
    buckets: Sequence[Bucket],
    groups: Groups,
    problems: Sequence[str],
    forgiving: bool,
    settings: str,
) -> tuple[float, bool]:
    """Form the norm of the summed gradient over all ranks; a collective of a few hundred bytes.

    Every element counts on exactly one rank, and squares are added without rounding, so that the
    norm is the same for every mesh, stage and bucket size.

    Args:
        buckets: The buckets, whose reductions have been started.
        groups: The ranks.
        problems: What this rank has found wrong.
        forgiving: Whether gradients that are not finite are no error.
        settings: What has to be the same on all ranks in this step, a line for each.

    Returns:
        The norm, and whether a gradient is not finite somewhere.

    Raises:
        ArgumentError: On every rank, if any has a problem.
        MismatchError: On every rank, if they have different settings.
    """
    limbs, bad = kernels.new_exact_sum(), set()
    odd = sum(bucket.add_squares(limbs, bad) for bucket in _reduced(buckets, groups))
    own = set().union(*(bucket.gradients.bad for bucket in buckets))
    vector = np.concatenate([limbs, vote(settings), [odd, bool(own), len(problems)]])
    groups.world.all_reduce(vector, "norm").wait()
    limbs, votes = vector[: limbs.size], vector[limbs.size : -3]
    check_unanimous(votes, settings, groups.world)
    odd, blamed, wrong = map(int, vector[-3:])
    odd += blamed  # also what only a rank has whose copy does not count
    if wrong or (odd and not forgiving):
        texts, names = list(problems), ", ".join(sorted(own if blamed else bad))
        if odd and names:
            fault = "gradients that are not finite" if blamed else "part of an infinite sum"
            texts.append(f"{fault}, of {names}")
        told = told_by(gather_texts("; ".join(texts), groups.world))
        raise ArgumentError(f"the step was not taken: {told}")
    norm = math.sqrt(kernels.exact_sum(limbs))
    return (math.inf if odd else norm), odd > 0


def _reduced(buckets: Sequence[Bucket], groups: Groups) -> Iterator[Bucket]:
    """Yield each bucket once its gradient is there, while others are still on their way."""
    ahead, waiting = groups.replica.world_size > 1, []
    for bucket in buckets:
        waiting.append((bucket, bucket.gradients.finish()))
        if len(waiting) > ahead:
            first, pending = waiting.pop(0)
            pending.wait()
            yield first
    for bucket, pending in waiting:
        pending.wait()
        yield bucket
