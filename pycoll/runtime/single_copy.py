"""For which calls ranks may read each other's private arrays, instead of copying them twice."""

from __future__ import annotations

from dataclasses import replace

from pycoll.algorithms import find
from pycoll.runtime.plans import CallSpec
from pycoll.runtime.select import Choice
from pycoll.schedule.collectives import COLLECTIVES
from pycoll.types import Order

LEAST_BYTES = 64 << 10
"""Of the full vector. Below, what the kernel does for a call takes longer than both copies."""

_READERS = {  # nobody writes to another rank's arrays in these
    "all_reduce": ("two_shot_pull", "two_shot_pull_rank"),
    "reduce_scatter": ("direct", "direct_rank"),
    "reduce": ("direct", "direct_rank"),
    "all_gather": ("direct_pull",),
    "broadcast": ("direct",),
    "scatter": ("direct",),
    "all_to_all": ("direct",),
}


def with_alternative(spec: CallSpec, choice: Choice) -> CallSpec:
    """Give a call on private arrays the alternative to read them, if it can have one.

    The result is the same: a reduction whose order is not pinned gets none.
    """
    wish = choice.wish
    reduces = COLLECTIVES[spec.collective].reduces
    if spec.direct or wish.messages or wish.n == 1 or wish.nbytes < LEAST_BYTES:
        return spec
    if reduces and spec.order == Order.ANY:
        return spec
    for name in _READERS.get(spec.collective, ()):
        algorithm = find(spec.collective, name)
        if wish.obstacle(algorithm):
            continue
        params = (("root", spec.root),) if "root" in algorithm.params else ()
        reading = replace(spec, algorithm=algorithm, params=params, direct=True, across=True)
        return replace(spec, alternative=reading)
    return spec
