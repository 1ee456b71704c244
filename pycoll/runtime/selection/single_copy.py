"""For which calls ranks may read each other's private arrays, instead of copying them twice."""

from __future__ import annotations

from dataclasses import replace

from pycoll.algorithms import find
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.selection.select import Choice

LEAST_BYTES = 64 << 10
"""Of the full vector. Below, what the kernel does for a call takes longer than both copies."""

_READERS = {  # in these every rank fetches what it needs, and nobody writes to another
    "all_gather": "direct_pull",
    "broadcast": "direct",
    "scatter": "direct",
    "all_to_all": "direct",
}


def with_alternative(spec: CallSpec, choice: Choice) -> CallSpec:
    """Give a call on private arrays the alternative to read them, if it can have one."""
    wish, name = choice.wish, _READERS.get(spec.collective)
    if name is None or spec.direct or wish.messages or wish.n == 1 or wish.nbytes < LEAST_BYTES:
        return spec
    algorithm = find(spec.collective, name)
    params = (("root", spec.root),) if "root" in algorithm.params else ()
    reading = replace(spec, algorithm=algorithm, params=params, direct=True, across=True)
    return replace(spec, alternative=reading)
