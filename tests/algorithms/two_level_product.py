"""A collective over hosts as one algorithm over all ranks, so that it can be proven like any other.

Ranks that run the stages use shared memory for some of them and messages for the rest; here they
are one schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import numpy as np

from pycoll.algorithms.two_level.plans import PLANS
from pycoll.algorithms.two_level.stages import NONE, Hosts, Stage, TwoLevels, refined
from pycoll.errors import ScheduleError
from pycoll.schedule.ir import ACC, IN, OUT, TMP, Algorithm, Fold, Piece, Vector
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.table import unique_rows

_IN_PLACE = ("all_reduce", "broadcast", "reduce")


def product(
    collective: str, hosts: Hosts, across: Algorithm, order: str = "", **params: int
) -> Algorithm:
    """Compose a collective of its stages.

    Args:
        collective: Its name.
        hosts: Who is where.
        across: The collective between hosts.
        order: Reduction order that the whole gives.
        **params: Parameters of ``across``, its root apart.
    """
    if "root" in across.params:
        params["root"] = hosts.of[hosts.root]
    return composed(collective, hosts, PLANS[collective](hosts, across, params), order)


def composed(collective: str, hosts: Hosts, plan: TwoLevels, order: str) -> Algorithm:
    """Compose a collective of the stages of a plan."""
    stages = [s for s in (plan.before, plan.across, plan.between, plan.after) if s is not None]
    rooted = {"root": hosts.root} if COLLECTIVES[collective].rooted else {}
    return Algorithm(
        collective=collective,
        name="two_levels",
        rounds=lambda rank, n, **_: _rounds(stages, plan, rank),
        chunks=lambda n, **_: plan.chunks,
        slots=lambda n, **_: plan.slots + max(map(_scratch, stages)),
        order=order,
        in_place=collective in _IN_PLACE,
        in_place_staged=collective in _IN_PLACE,
        params=rooted,
        worlds=lambda n: n == hosts.n,
    )


def _scratch(stage: Stage) -> int:
    """Return the slots that the algorithm of a stage itself uses."""
    made = (stage.algorithm_of(t).schedule(len(t), **stage.params) for t in stage.teams)
    return max(stage.share * schedule.slots for schedule in made)


def _rounds(stages: list[Stage], plan: TwoLevels, rank: Vector) -> Iterator[list[Fold]]:
    for stage in stages:
        teams = [_placed(stage, team, plan.slots, rank) for team in stage.teams]
        for together in zip_longest(*teams, fillvalue=()):
            folds = [f for part in together for f in part]
            if folds:
                yield folds


def _placed(stage: Stage, team: tuple[int, ...], slots: int, rank: Vector) -> Iterator[list[Fold]]:
    """Yield the rounds of one team of a stage, in the places of the whole."""
    place = np.full(len(stage.source), NONE)
    place[list(team)] = range(len(team))
    local = place[np.asarray(rank)]
    algorithm = refined(stage.algorithm_of(team), stage.share)
    schedule = algorithm.schedule(len(team), **stage.params)
    for folds in schedule.rounds(np.maximum(local, 0)):
        yield [
            one
            for f in folds
            for step in range(int(np.max(f.count, initial=0)))
            for one in _single(stage, team, slots, schedule.chunks, f, step, local != NONE)
        ]


def _single(
    stage: Stage,
    team: tuple[int, ...],
    slots: int,
    chunks: int,
    f: Fold,
    step: int,
    active: np.ndarray,
) -> Iterator[Fold]:
    """Yield the fold of one chunk; one for each kind of memory that ranks use in its place."""
    where = active & np.asarray(f.where) & (step < np.asarray(f.count))
    where = where if where.ndim else bool(where)
    ends = [_end(stage, team, slots, chunks, piece, step) for piece in f.pieces]
    for _, _, place in ends:
        where = where & (place != NONE)
    if not np.any(where):
        return
    kinds = np.stack([np.broadcast_to(buffer, np.shape(where)) for _, buffer, _ in ends])
    for kind in unique_rows(kinds[:, where].T if np.ndim(where) else kinds[None, :]):
        here = where & (kinds == kind.reshape(-1, *[1] * np.ndim(where))).all(axis=0)
        pieces = [
            Piece(owner, (IN, OUT, TMP)[int(k)], np.maximum(at, 0))
            for (owner, _, at), k in zip(ends, kind, strict=True)
        ]
        n = len(f.srcs)
        yield Fold(tuple(pieces[:n]), tuple(pieces[n:]), 1, here, f.tree)


def _end(
    stage: Stage, team: tuple[int, ...], slots: int, chunks: int, piece: Piece, step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rank, buffer and place of a piece."""
    owner = np.array(team)[np.asarray(piece.rank) % len(team)]
    if piece.buffer == TMP:
        return owner, np.full(np.shape(owner), int(TMP)), slots + np.asarray(piece.chunk) + step
    if piece.buffer == ACC and stage.source != stage.target:
        raise ScheduleError("ACC has no meaning between different buffers of a stage")
    given = piece.buffer == IN
    table, buffers = (stage.gives, stage.source) if given else (stage.takes, stage.target)
    at = (np.asarray(piece.chunk) + step) % chunks
    return owner, np.array(buffers, int)[owner], table[owner, at]
