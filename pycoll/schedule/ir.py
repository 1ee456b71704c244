"""The language in which a collective algorithm is written.

An algorithm is a generator over rounds. It is a pure function of a rank and the world size, and the
rank may be one integer or a NumPy vector of ranks, so the same lines give one rank's program and
the whole world's. It contains no synchronisation and no transport::

    @algorithm("all_reduce")
    def two_shot(rank, n):
        yield fold([at(peer, IN, rank) for peer in range(n)], to=at(rank, OUT, rank))
        for step in range(1, n):
            peer = (rank + step) % n
            yield fold(at(peer, OUT, peer), to=at(rank, OUT, peer))

A round is one fold, or a list of folds that run concurrently: none of them may read or write what
another one of the round writes. The rank given to the generator is the *owner* of the folds it
yields: it is the one who reads, computes and stores. Ranks are taken modulo the world size, chunks
of user buffers modulo the number of chunks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.language.author_errors import author_errors, current_line
from pycoll.schedule.language.collectives import COLLECTIVES, order_of
from pycoll.schedule.language.pieces import (
    ACC,
    IN,
    OUT,
    TMP,
    Buffer,
    Fold,
    Piece,
    Relative,
    Steps,
    Vector,
    at,
    fold,
    folds_of,
    in_turn,
    together,
)
from pycoll.schedule.language.relative import RelativeLines, relative_lines

__all__ = [
    "ACC",
    "IN",
    "MAX_LINES",
    "OUT",
    "TMP",
    "Algorithm",
    "Buffer",
    "Fold",
    "Piece",
    "Round",
    "Schedule",
    "Steps",
    "Vector",
    "algorithm",
    "at",
    "fold",
    "in_turn",
    "together",
]

MAX_LINES = 1 << 18
"""Folds that a schedule may have, over all rounds: enough for rings of 65,536 ranks."""
_ENTRIES = 1 << 13
"""Steps of ranks that are looked at together, for those that say in which they take part."""
_END = object()
Round = Fold | Sequence[Fold] | Steps
ChunkCount = Callable[..., int]


class Block(NamedTuple):
    """Consecutive rounds of one form, for the ranks that take part: one round, mostly."""

    folds: list[Fold]  # those of each round, with numbers for each entry in place of each rank
    rounds: int  # how many; 0 if more of the same rounds follow, of other ranks
    round: Vector  # of each entry, counted from the first of these
    column: np.ndarray | slice  # which of the ranks each entry is of
    owner: np.ndarray  # that rank; the same object where a fold names it as it is


@dataclass(frozen=True)
class Algorithm:
    """A named algorithm for one collective.

    Attributes:
        collective: Name of the collective, such as ``"all_reduce"``.
        name: Name of the algorithm, such as ``"ring"``.
        rounds: The generator, called with ``rank``, ``n`` and the parameters.
        chunks: Number of chunks of the full vector, called with ``n`` and the parameters.
        slots: Number of scratch slots a rank needs, called likewise.
        order: Reduction order it gives: ``"tree"``, ``"rank"``, ``"any"``; ``""`` if it only moves.
        in_place: Whether IN and OUT may be the same memory on every rank.
        in_place_staged: Likewise where peers do not reach the arrays themselves.
        params: Parameters and their defaults, such as ``{"root": 0}``.
        worlds: Tells which world sizes it is defined for.
    """

    collective: str
    name: str
    rounds: Callable[..., Iterator[Round]]
    chunks: ChunkCount
    slots: ChunkCount
    order: str
    in_place: bool
    in_place_staged: bool
    params: dict[str, Any] = field(default_factory=dict, hash=False)
    worlds: Callable[[int], bool] = lambda n: True

    @property
    def doc(self) -> str:
        """First line of the algorithm's docstring."""
        return (self.rounds.__doc__ or "").strip().split("\n")[0]

    def works_for(self, n: int) -> bool:
        """Whether it is defined for a world size.

        ScheduleError if its ``worlds`` cannot tell.
        """
        if n < 1:
            return False
        with author_errors(f"{self.collective}/{self.name}: worlds({n})", self.worlds):
            return bool(self.worlds(n))

    def schedule(self, n: int, **params: Any) -> Schedule:
        """Fix the world size and the parameters.

        Raises:
            ScheduleError: For a world size or a parameter that the algorithm does not know.
        """
        unknown = set(params) - set(self.params)
        if unknown:
            known = ", ".join(self.params) or "none"
            raise ScheduleError(f"{self.name}: unknown parameter {unknown.pop()!r}; known: {known}")
        if not isinstance(n, (int, np.integer)):
            raise ScheduleError(f"{self.collective}/{self.name}: {n!r} is no number of ranks")
        if not self.works_for(n):
            raise ScheduleError(f"{self.collective}/{self.name} is not defined for {n} ranks")
        return Schedule(self, n, {**self.params, **params})


def algorithm(
    collective: str,
    name: str | None = None,
    *,
    chunks: ChunkCount | int | None = None,
    slots: ChunkCount | int = 0,
    order: str | None = None,
    in_place: bool = True,
    in_place_staged: bool | None = None,
    worlds: Callable[[int], bool] = lambda n: True,
    **params: Any,
) -> Callable[[Callable[..., Iterator[Round]]], Algorithm]:
    """Make an `Algorithm` of a generator function; ScheduleError for unknown collectives or orders.

    Args:
        collective: The collective it computes.
        name: Its name; by default the name of the function.
        chunks: Number of chunks of the full vector; by default the world size.
        slots: Number of scratch slots of each rank.
        order: Reduction order; by default ``"any"`` for reductions.
        in_place: Whether IN and OUT may be the same memory.
        in_place_staged: Likewise where peers do not reach the arrays; by default the same.
        worlds: Tells which world sizes it is defined for.
        **params: Parameters with their defaults; calls set ``root``, and no other.
    """
    usual_order = order_of(collective, order)

    def as_function(value: ChunkCount | int | None) -> ChunkCount:
        if callable(value):
            return value
        return (lambda n, **_: n) if value is None else (lambda n, **_: value)

    def decorate(rounds: Callable[..., Iterator[Round]]) -> Algorithm:
        if not name and not hasattr(rounds, "__name__"):
            raise ScheduleError(f"{rounds!r} has no name: expected a generator function, or a name")
        return Algorithm(
            collective=collective,
            name=name or str(rounds.__name__),
            rounds=rounds,
            chunks=as_function(chunks),
            slots=as_function(slots),
            order=usual_order if order is None else order,
            in_place=in_place,
            in_place_staged=in_place if in_place_staged is None else in_place_staged,
            params=params,
            worlds=worlds,
        )

    return decorate


@dataclass(frozen=True)
class Schedule:
    """An algorithm with its world size and parameters: what moves, for all ranks.

    What it has found out of its algorithm stays: what is proven and what runs are the same numbers.
    """

    algorithm: Algorithm
    n: int
    params: dict[str, Any] = field(hash=False)

    @property
    def collective(self) -> str:
        """Name of the collective."""
        return self.algorithm.collective

    @cached_property
    def chunks(self) -> int:
        """Number of chunks of the full vector."""
        return self._number("chunks", self.algorithm.chunks)

    @cached_property
    def slots(self) -> int:
        """Number of scratch slots of each rank."""
        return self._number("slots", self.algorithm.slots)

    def _number(self, what: str, function: ChunkCount) -> int:
        with author_errors(f"{self}: the number of {what}", function):
            found = operator.index(function(self.n, **self.params))
        if found < 0:
            raise ScheduleError(f"{self}: the number of {what} is {found}")
        if found > MAX_LINES * self.n:
            raise ScheduleError(
                f"{self}: the number of {what} is {found}, expected at most {MAX_LINES * self.n}"
            )
        return found

    @property
    def root(self) -> int:
        """Root of a rooted collective, else 0."""
        root = self.params.get("root", 0)
        if not isinstance(root, (int, np.integer)):
            raise ScheduleError(f"{self}: there is no rank {root!r} to be the root")
        return int(root)

    def rounds(self, rank: Vector) -> Iterator[list[Fold]]:
        """Yield the folds of each round, for one rank or a vector of ranks.

        ScheduleError if the algorithm raises anything, if it yields something else, or more than
        `MAX_LINES` folds or rounds.
        """
        lines = 0
        for number, (folds, where) in enumerate(self._each_round(rank)):
            group = self._group(folds, where, number)
            lines += len(group)
            self._check_lines(max(lines, number + 1), where)
            yield group

    def blocks(self, ranks: np.ndarray) -> Iterator[Block]:
        """Yield the rounds for a vector of ranks, those of `in_turn` with ``during`` as one block.

        ScheduleError as in `rounds`.
        """
        lines = number = 0
        for index, (item, where) in enumerate(self._yielded(ranks)):
            if isinstance(item, Steps) and item.during is not None:
                found = self._sparse(index, item, ranks)
            else:
                rounds = (self._group(f, where, number) for f in self._rounds_of(item, where))
                found = (Block(folds, 1, 0, slice(None), ranks) for folds in rounds)
            for block in found:
                number += block.rounds
                lines += block.rounds * len(block.folds)
                self._check_lines(max(lines, number), where)
                yield block

    def _sparse(self, index: int, item: Steps, ranks: np.ndarray) -> Iterator[Block]:
        """Yield steps for those ranks that take part in them: some at a time, as one block."""
        with author_errors(self, self.algorithm.rounds):
            bounds = [np.broadcast_to(np.asarray(b), ranks.shape) for b in item.during or ()]
            first, last = np.clip(bounds, item.over.start, max(item.over.start, item.over.stop))
            length = np.maximum(last - first, 0)
        end = np.cumsum(length)
        parts = max(1, -(-int(end[-1]) // _ENTRIES)) if len(end) else 1
        cuts = [0, *np.searchsorted(end, np.arange(1, parts) * _ENTRIES).tolist(), len(ranks)]
        for low, high in pairwise(cuts):
            column = np.repeat(np.arange(low, high), length[low:high])
            begin = end[low] - length[low] if low < high else 0
            step = first[column] + begin + np.arange(len(column)) - (end - length)[column]
            owner = ranks[column]
            again, _ = next(islice(self._yielded(owner), index, None))
            with author_errors(self, self.algorithm.rounds):
                folds = folds_of(again.make(step))
            rounds = len(item.over) if high == len(ranks) else 0
            yield Block(folds, rounds, step - item.over.start, column, owner)

    def _group(self, folds: Any, where: Iterator[Any], number: int) -> list[Fold]:
        """Return the folds of a round."""
        try:
            return folds_of(folds)
        except ScheduleError:
            raise ScheduleError(
                f"{self}: {current_line(where)}round {number} is {folds!r}, "
                "expected a fold or a list of folds"
            ) from None

    def _check_lines(self, lines: int, where: Iterator[Any]) -> None:
        if lines > MAX_LINES:
            raise ScheduleError(
                f"{self}: {current_line(where)}more than {MAX_LINES} folds or rounds"
            )

    def _each_round(self, rank: Vector) -> Iterator[tuple[Any, Iterator[Any]]]:
        """Yield what stands for each round, and the generator, which knows the line."""
        for item, found in self._yielded(rank):
            for folds in self._rounds_of(item, found):
                yield folds, found

    def _rounds_of(self, item: Any, found: Iterator[Any]) -> Iterator[Any]:
        """Yield the rounds of one item that the generator has yielded."""
        if not isinstance(item, Steps):
            yield item
            return
        function = self.algorithm.rounds
        with author_errors(self, function):
            steps = iter([list(item)] if item.at_once and len(item.over) else item)
        while True:
            with author_errors(self, function):
                folds = next(steps, _END)
            if folds is _END:
                return
            yield folds

    def _yielded(self, rank: Vector) -> Iterator[tuple[Any, Iterator[Any]]]:
        """Yield what the author's generator yields, and the generator."""
        function = self.algorithm.rounds
        with author_errors(self, function):
            found = function(rank, self.n, **self.params)
            if not isinstance(found, Iterator):
                raise ScheduleError(f"gives {found!r} in place of rounds: it must yield folds")
        while True:
            with author_errors(self, function):
                item = next(found, _END)
            if item is _END:
                return
            yield item, found

    def all_ranks(self) -> np.ndarray:
        """Vector of all ranks, ready for `rounds`."""
        return np.arange(self.n, dtype=np.int64)

    @cached_property
    def relative(self) -> RelativeLines | None:
        """The folds of every rank as those of rank 0, moved; None if they are not alike."""
        try:
            yielded = (item for item, _ in self._yielded(Relative(0)))
            return relative_lines(yielded, self.n, self.chunks, MAX_LINES)
        except ScheduleError:  # it depends on the rank, or is wrong, which the ranks will show
            return None

    @property
    def one_hop(self) -> bool:
        """Whether every piece moves in the same round, so that nothing is passed on."""
        if (lines := self.relative) is not None:
            of = np.repeat(lines.round, lines.nsrc + lines.ndst)[lines.away(self.n)]
            return len(of) == 0 or of.min() == of.max()
        everyone, found = self.all_ranks(), 0
        for pieces in ([p for f in folds for p in f.pieces] for folds in self.rounds(everyone)):
            found += any(np.any((np.asarray(p.rank) - everyone) % self.n) for p in pieces)
            if found > 1:
                return False
        return True

    @cached_property
    def reduces_at_once(self) -> bool:
        """Whether every fold that combines anything combines one input of each rank."""
        if COLLECTIVES[self.collective].prefix is not None:
            return False
        if (lines := self.relative) is not None:
            fold = np.repeat(np.arange(len(lines.nsrc)), lines.nsrc + lines.ndst)
            place = np.arange(len(fold)) - (np.cumsum(lines.nsrc + lines.ndst) - lines.ndst)[fold]
            early = (lines.buffer == Buffer.ACC.value) & (lines.round[fold] == 0)
            other = (place < 0) & (lines.buffer != Buffer.IN.value) & ~early
            whole = lines.nsrc == self.n
            whole[fold[other]] = False
            return bool(np.all(whole | (lines.nsrc < 2) | (lines.count == 0)))
        for number, folds in enumerate(self.rounds(self.all_ranks())):
            inputs = (Buffer.IN, Buffer.IN if number else Buffer.ACC)
            for f in (f for f in folds if len(f.srcs) > 1):
                whole = len(f.srcs) == self.n and all(p.buffer in inputs for p in f.srcs)
                if not whole and f.happens:
                    return False
        return True

    def __str__(self) -> str:
        extra = "".join(f", {k}={v}" for k, v in self.params.items())
        return f"{self.collective}/{self.algorithm.name}(n={self.n}{extra})"
