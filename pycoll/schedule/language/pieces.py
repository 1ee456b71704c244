"""The words of a schedule: pieces of buffers, and folds of pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from pycoll.errors import ScheduleError

_LIMIT = 1 << 62  # of ranks and chunks, before they are taken modulo
_MOST_PIECES = 0xFFFF  # what the 16 bits of an instruction hold
Vector = Any  # int, or a NumPy integer array with one entry per rank of the vector form


class Relative:
    """A number so much ahead of a rank, whichever rank it is; see `relative_lines`."""

    __slots__ = ("ahead",)
    __array_ufunc__ = None
    __hash__: None = None

    def __init__(self, ahead: Vector) -> None:
        """Name the distance, or one for each of several steps."""
        self.ahead: Vector = ahead

    def __add__(self, number: Vector) -> Relative:
        """Go further ahead."""
        return Relative(self.ahead + _distance(number))

    __radd__ = __add__

    def __sub__(self, number: Vector) -> Relative:
        """Go back."""
        return Relative(self.ahead - _distance(number))

    def _asked(self, *_: Any, **__: Any) -> Any:
        raise TypeError("it depends on the rank")

    __eq__: Callable[..., Any] = _asked
    __ne__: Callable[..., Any] = _asked
    __bool__: Callable[..., Any] = _asked
    __array__: Callable[..., Any] = _asked


class Buffer(IntEnum):
    """Where a piece lives.

    IN and OUT are the user's arrays. ACC stands for IN until the piece is first written, and for
    OUT from then on. TMP is scratch memory of the owner, counted in slots of one chunk.
    """

    IN = 0
    OUT = 1
    TMP = 2
    ACC = 3


IN, OUT, TMP, ACC = Buffer.IN, Buffer.OUT, Buffer.TMP, Buffer.ACC


def _distance(number: Vector) -> Vector:
    if isinstance(number, (int, np.integer)):
        return int(number)
    if isinstance(number, np.ndarray) and number.dtype.kind == "i":
        return number
    raise TypeError(f"{number!r} is no distance between ranks")


@dataclass(slots=True, unsafe_hash=True)  # frozen, it would take three times as long to make
class Piece:
    """One chunk (or the first of several) of a buffer of a rank."""

    rank: Vector
    buffer: Buffer
    chunk: Vector


@dataclass(frozen=True, slots=True)
class Fold:
    """Read ``srcs`` in order, combine them, store the result in every piece of ``dsts``."""

    srcs: tuple[Piece, ...]
    dsts: tuple[Piece, ...]
    count: Vector
    where: Vector
    tree: bool

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All its pieces, sources before destinations."""
        return self.srcs + self.dsts

    def placed(self, place: Callable[[Piece], Piece], share: int = 1) -> Fold:
        """Return the same fold of other pieces, with ``share`` chunks for each of its own."""
        srcs, dsts = tuple(map(place, self.srcs)), tuple(map(place, self.dsts))
        return Fold(srcs, dsts, self.count * share, self.where, self.tree)

    @property
    def happens(self) -> bool:
        """Whether any of the ranks does it, for any chunk."""
        return bool(np.any(np.asarray(self.where, bool) & (np.asarray(self.count) > 0)))


def at(rank: Vector, buffer: Buffer, chunk: Vector = 0) -> Piece:
    """Name a piece: chunk ``chunk`` of ``buffer`` on ``rank``.

    ScheduleError if the buffer is none, or the numbers are no integers.
    """
    if type(buffer) is not Buffer:
        raise ScheduleError(f"at(): the buffer is {buffer!r}, expected IN, OUT, TMP or ACC")
    if type(rank) is not int or not -_LIMIT < rank < _LIMIT:
        _check_integer("at(): the rank", rank)
    if type(chunk) is not int or not -_LIMIT < chunk < _LIMIT:
        _check_integer("at(): the chunk", chunk)
    return Piece(rank, buffer, chunk)


def _check_integer(what: str, number: Vector) -> None:
    """Refuse what is neither an integer, or a truth value, nor an array of them."""
    if type(number) is Relative:
        return
    if isinstance(number, int):
        fits = -_LIMIT < number < _LIMIT
    else:
        try:
            fits = np.asarray(number).dtype.kind in "iub"
        except ValueError:  # lists of several lengths
            fits = False
    if not fits:
        raise ScheduleError(f"{what} is {number!r}, expected an integer, or one for each rank")


def _pieces(what: str, given: Piece | Sequence[Piece]) -> tuple[Piece, ...]:
    if type(given) is Piece:
        return (given,)
    several = isinstance(given, Iterable) and not isinstance(given, str)
    found = tuple(given) if several else (given,)
    if not all(isinstance(piece, Piece) for piece in found):
        raise ScheduleError(f"fold(): {what} are {given!r}, expected at(...), or a list of them")
    if not found:
        raise ScheduleError("a fold needs at least one source and one destination")
    if len(found) > _MOST_PIECES:
        raise ScheduleError(f"fold(): {what} are {len(found)}, expected at most {_MOST_PIECES}")
    return found


def fold(
    srcs: Piece | Sequence[Piece],
    to: Piece | Sequence[Piece],
    *,
    count: Vector = 1,
    where: Vector = True,
    tree: bool = False,
) -> Fold:
    """Describe the one data operation.

    Args:
        srcs: Pieces to combine, left to right; one piece means a copy.
        to: Piece or pieces that receive the result.
        count: Number of consecutive chunks, the same for every piece; 0 means that nothing happens.
        where: Mask of the ranks that take part.
        tree: Combine along the in-order balanced tree instead of left to right.

    Raises:
        ScheduleError: If there are no pieces, or the numbers are no integers, or `tree` is no
            truth value.
    """
    sources, targets = _pieces("the sources", srcs), _pieces("the destinations", to)
    if type(count) is not int or not -_LIMIT < count < _LIMIT:
        _check_integer("fold(): count", count)
    if where is not True:
        _check_integer("fold(): where", where)
    if not isinstance(tree, (bool, np.bool_)):
        raise ScheduleError(f"fold(): tree is {tree!r}, expected True or False, for all ranks")
    return Fold(sources, targets, count, where, tree)


@dataclass(frozen=True, slots=True)
class Steps:
    """Folds of one form, for each of a range of steps; see `together` and `in_turn`."""

    over: range
    make: Callable[[Vector], Fold | list[Fold]]
    at_once: bool
    during: tuple[Vector, Vector] | None = None

    def __iter__(self) -> Iterator[Fold | list[Fold]]:
        """Yield the fold of each step, or its folds."""
        for step in self.over:
            made = self.make(step)
            if self.during is not None:
                first, last = self.during
                acts = (first <= step) & (step < last)
                yield [replace(f, where=f.where & acts) for f in folds_of(made)]
                continue
            if not isinstance(made, Fold):
                raise ScheduleError(f"step {step} is {made!r}, expected a fold")
            yield made


def folds_of(made: Any) -> list[Fold]:
    """Return what makes up a round as a list; ScheduleError if it is something else than folds."""
    folds = [made] if isinstance(made, Fold) else made
    if not isinstance(folds, (list, tuple)) or not all(isinstance(f, Fold) for f in folds):
        raise ScheduleError(f"{made!r} in place of a fold or a list of folds")
    return list(folds)


def together(over: range, make: Callable[[Vector], Fold]) -> Steps:
    """Describe a round of many folds of one form.

    Args:
        over: The steps.
        make: Returns the fold of a step. It must not ask which step it is, only calculate with it:
            it may be called with an array of steps, too, so that large worlds take no longer.
    """
    return Steps(over, make, at_once=True)


def in_turn(
    over: range,
    make: Callable[[Vector], Fold | list[Fold]],
    *,
    during: tuple[Vector, Vector] | None = None,
) -> Steps:
    """Describe many rounds of one fold each; see `together`.

    Args:
        over: The steps.
        make: Returns the fold of a step; with ``during`` also a list of them.
        during: For each rank, the first step in which it takes part, and the one behind the last.
            Where these are few, a long chain of ranks is described as fast as a short one.

    Raises:
        ScheduleError: If there is a ``during``, and the steps are not consecutive.
    """
    if during is not None and over.step != 1:
        raise ScheduleError(f"in_turn(): the steps are {over}, expected one after the other")
    return Steps(over, make, at_once=False, during=during)
