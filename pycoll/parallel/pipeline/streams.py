"""Schedules without a flush: the micro-batches of the next step follow at once, parameters are old.

A program of theirs has several steps, since what is proven is the steady state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pycoll.parallel.pipeline.program import B, F, Op, Schedule, Use, W, pipeline

_STEPS = 4


def _stream(stage: int, p: int, micros: int) -> Iterator[Op]:
    """One forward, one backward, for all micro-batches of all steps."""
    ahead = min(p - stage - 1, micros)
    yield from map(F, range(ahead))
    for i in range(micros):
        if ahead + i < micros:
            yield F(ahead + i)
        yield from (B(i), W(i))


@pipeline(
    "pipedream",
    live=lambda stage, p, m: p - stage,
    steps=_STEPS,
    versions=lambda stage, p, m: p - stage,
    age=lambda stage, p, m: p - stage - 1,
    per_step=lambda m: 1,
    bubble=lambda p, m: 2 * (p - 1),
)
def pipedream(stage: int, p: int, m: int) -> Iterator[Op]:
    """1F1B without a flush: parameters change after every micro-batch, on every stage by itself.

    A backward pass takes the parameters of its forward pass, which the stage has kept. Stages take
    different versions for one micro-batch.

    Cost: no bubble after the first p - 1; p - stage live activations and versions.
    Source: Narayanan et al., "PipeDream", SOSP 2019, section 3.3, weight stashing.
    """
    yield from _stream(stage, p, m)


def _as_stage_0(use: Use) -> int:
    """Return the version that stage 0 has had for a micro-batch."""
    return max(0, use.micro - use.p + 1)


pipedream_sync: Schedule = replace(
    pipedream,
    name="pipedream_sync",
    weights=_as_stage_0,
    versions=lambda stage, p, m: p,
    age=lambda stage, p, m: p - 1,
    source='Narayanan et al., "PipeDream", SOSP 2019, section 3.3, vertical sync.',
)


def _one_step_old(use: Use) -> int:
    return max(0, use.micro // use.m - 1)


@pipeline(
    "2bw",
    live=lambda stage, p, m: p - stage,
    steps=_STEPS,
    versions=lambda stage, p, m: 2,
    age=lambda stage, p, m: 1,
    weights=_one_step_old,
    least=lambda p: p,
    bubble=lambda p, m: 2 * (p - 1),
)
def two_bw(stage: int, p: int, m: int) -> Iterator[Op]:
    """1F1B without a flush, two versions: micro-batches of step t take what step t - 2 has left.

    A step needs at least p micro-batches, so that all of a step before the last are over when the
    first of the next one begins.

    Cost: no bubble after the first p - 1; p - stage live activations, 2 versions.
    Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021,
    section 3.1.
    """
    yield from _stream(stage, p, m)
