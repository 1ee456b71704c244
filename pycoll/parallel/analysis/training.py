"""A data-parallel training step in time: layers, buckets, and their sums on a simulated network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pycoll.algorithms import find
from pycoll.errors import ArgumentError, ScheduleError
from pycoll.schedule.cost.fabric import Fabric
from pycoll.schedule.cost.simulate import simulate


@dataclass(frozen=True)
class Part:
    """A layer, or any other part of a model.

    Attributes:
        forward_s: Seconds of its forward pass, measured, or operations over operations per second.
        backward_s: Seconds of its backward pass.
        nbytes: Bytes of its gradients.
    """

    forward_s: float
    backward_s: float
    nbytes: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: Of both passes.
        exposed: From the end of the backward pass to the last sum of gradients.
        reducing: Of all sums; what is not exposed is hidden behind the backward pass.
        waiting: For the rank that loses most, beyond what a rank loses on average.
    """

    compute: float
    exposed: float
    reducing: float
    waiting: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.exposed + self.waiting


def step_time(
    parts: Sequence[Part],
    network: Fabric,
    *,
    bucket_bytes: float = 25e6,
    noise_s: float = 0.0,
) -> StepTime:
    """Return the time of a step of `DataParallel`, ZeRO 0, on all ranks of a network.

    The backward pass goes from the last part to the first. A bucket is summed as soon as it is
    full, after the one before; the last one holds what is left.

    Args:
        parts: The model, in the order of the forward pass.
        network: What joins the ranks; see `pycoll.schedule.cost.described.fabric`.
        bucket_bytes: Bytes from which a bucket is full.
        noise_s: What a rank loses in a step, on average, exponentially distributed: a step waits
            for the largest of all.

    Raises:
        ArgumentError: If there are no parts, or a bucket holds nothing.
    """
    if not parts or bucket_bytes <= 0 or noise_s < 0:
        raise ArgumentError("a step needs parts, buckets of some bytes, and no negative noise")
    reduced = lru_cache(maxsize=None)(lambda nbytes: fastest_sum(network, nbytes))
    compute, end, reducing = _timeline(parts, bucket_bytes, reduced)
    largest = sum(1 / rank for rank in range(1, network.n + 1))  # of so many, over their mean
    forward = sum(part.forward_s for part in parts)
    return StepTime(forward + compute, max(0.0, end - compute), reducing, noise_s * (largest - 1))


def _timeline(
    parts: Sequence[Part], bucket_bytes: float, reduced: Callable[[float], float]
) -> tuple[float, float, float]:
    """Return when the backward pass ends, when the last sum does, and what all sums take."""
    now = end = reducing = held = 0.0
    for place, part in enumerate(reversed(parts), 1):
        now, held = now + part.backward_s, held + part.nbytes
        if held and (held >= bucket_bytes or place == len(parts)):
            took = reduced(held)
            end, reducing, held = max(end, now) + took, reducing + took, 0.0
    return now, end, reducing


def fastest_sum(network: Fabric, nbytes: float) -> float:
    """Return the seconds of an all-reduce of all ranks by the fastest of four algorithms."""
    n, near = network.n, network.near
    if n == 1:
        return 0.0
    made = [find("all_reduce", name).schedule(n) for name in ("ring", "halving_doubling")]
    if 1 < near < n and n % near == 0:
        for name in ("hierarchical", "hierarchical_ring"):
            try:
                made.append(find("all_reduce", name).schedule(n, local=near))
            except ScheduleError:
                continue
    return min(float(simulate(schedule, nbytes, network).max()) for schedule in made)
