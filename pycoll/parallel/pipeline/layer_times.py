"""How long the layers of a model take, measured on a micro-batch."""

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

_REPEATS = 3


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
