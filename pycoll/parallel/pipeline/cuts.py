"""Where a model is cut into the chunks of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel
from pycoll.parallel.compare import gather_problems
from pycoll.parallel.engine.options import Options
from pycoll.parallel.engine.passes import Sample
from pycoll.parallel.nn.layer import Loss
from pycoll.parallel.precision import cast
from pycoll.parallel.state.layout import Parameter, Unit
from pycoll.parallel.state.values import first_value

_REPEATS = 3  # of a layer that is timed

Cut = str | Sequence[str]
"""``"parameters"``, ``"time"``, or names of layers; see `pycoll.parallel.Pipeline`."""


def checked(cut: Cut | None) -> Cut:
    """Return a cut, that by parameters for None.

    Raises:
        ArgumentError: For a word that says nothing.
    """
    if isinstance(cut, str) and cut not in ("parameters", "time"):
        raise ArgumentError(f"cut={cut!r}; accepted: parameters, time, a list of names of layers")
    return "parameters" if cut is None else cut


def cut_units(names: Sequence[str], sizes: Sequence[int], chunks: int, cut: Cut) -> list[int]:
    """Return the first unit of each chunk.

    Args:
        names: Names of the units.
        sizes: Parameters, or time, of each unit.
        chunks: Number of chunks.
        cut: Names of the units that begin the second and later chunks; a word: the largest chunk
            is as small as it can be.

    Raises:
        ArgumentError: If there are too few units, or a name is not known or out of order.
    """
    if len(names) < chunks:
        raise ArgumentError(
            f"a pipeline of {chunks} chunks needs at least {chunks} layers; the model has "
            f"{len(names)}: {', '.join(names)}"
        )
    if isinstance(cut, str):
        return _balanced([size + 1 for size in sizes], chunks)
    unknown = [name for name in cut if name not in names]
    starts = [0, *(names.index(name) for name in cut if name in names)]
    if unknown or len(starts) != chunks or sorted(set(starts)) != starts:
        raise ArgumentError(
            f"cut={list(cut)!r}; expected the names of {chunks - 1} layers in their order, each "
            f"the first of a chunk, out of {', '.join(names[1:])}"
        )
    return starts


def _balanced(sizes: Sequence[int], chunks: int) -> list[int]:
    """Return starts of runs whose largest sum is least, by dynamic programming."""
    total = np.concatenate([[0], np.cumsum(sizes)])
    n = len(sizes)
    best = np.full((chunks + 1, n + 1), np.inf)
    start = np.zeros((chunks + 1, n + 1), int)
    best[0, 0] = 0
    for k in range(1, chunks + 1):
        for end in range(k, n - chunks + k + 1):
            worst = np.maximum(best[k - 1, k - 1 : end], total[end] - total[k - 1 : end])
            first = int(np.argmin(worst))
            best[k, end], start[k, end] = worst[first], first + k - 1
    starts, end = [], n
    for k in range(chunks, 0, -1):
        end = int(start[k, end])
        starts.append(end)
    return starts[::-1]


def layer_times(
    units: Sequence[Unit], loss: Loss, sample: Sample | None, options: Options, world: Channel
) -> list[int]:
    """Return nanoseconds of each layer, the same numbers on all ranks; a collective.

    Every rank runs all layers forward and backward, one after the other, with their first
    parameters. The quickest of three times counts, and the median over ranks. The loss belongs to
    the last layer.

    Raises:
        ArgumentError: On every rank, if one has no sample or its layers fail.
    """
    times, problem = np.zeros(len(units)), ""
    try:
        if sample is None:
            raise ArgumentError("none: cut='time' times the layers on a micro-batch")
        times[:] = _measure(units, loss, sample, options)
    except Exception as error:
        problem = f"sample: {error}"
    if found := gather_problems(problem, world):
        raise ArgumentError(f"layers cannot be timed: {found}")
    return np.median(world.gather_rows(times, "check"), axis=0).astype(int).tolist()


def _measure(units: Sequence[Unit], loss: Loss, sample: Sample, options: Options) -> list[float]:
    compute, found = options.recipe.compute, []
    x = cast(sample[0], compute or options.recipe.parameter)
    for unit in units:
        specs = unit.specs
        params = {
            local: options.wrap(cast(first_value(Parameter(full, specs[full])), compute))
            for local, full in unit.names.items()
        }
        seconds = []
        for _ in range(_REPEATS):
            start = time.perf_counter_ns()
            y, saved = unit.layer.forward(params, x)
            unit.layer.backward_input(params, saved, y)
            unit.layer.backward_weight(params, saved, y)
            seconds.append(time.perf_counter_ns() - start)
        found.append(min(seconds))
        x = y
    start = time.perf_counter_ns()
    loss.backward(loss.forward(x, sample[1])[2], 1.0)
    found[-1] += time.perf_counter_ns() - start
    return found
