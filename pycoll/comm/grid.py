"""Ranks in a grid: who the neighbours are, and what they exchange."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from pycoll.comm.other_names import NamesFromElsewhere
from pycoll.errors import ArgumentError, CollError, MismatchError
from pycoll.runtime.arrays.host_arrays import new_like, view
from pycoll.runtime.calls.message_ends import is_integer
from pycoll.runtime.calls.messages import wait_all

_A = TypeVar("_A", bound=Any)


class Grid(NamesFromElsewhere):
    """The ranks of a communicator along axes, in C order; made by `Communicator.grid`.

    Its messages are apart from those of the communicator, and it is to be closed like one.

    Attributes:
        shape: Number of ranks along each axis.
        periods: Whether each axis is closed to a ring.
        rank: Number of this rank, the same as in the communicator.
        coords: Place of this rank, one number for each axis.
    """

    def __init__(self, comm: Any, shape: Sequence[int], periods: Sequence[bool]) -> None:
        """Arrange the ranks of a communicator, which becomes the grid's own."""
        self._comm, self._session = comm, comm._session
        self.shape: tuple[int, ...] = tuple(shape)
        self.periods: tuple[bool, ...] = tuple(periods)
        self.rank: int = self._session.rank
        self.coords: tuple[int, ...] = self.coords_of(self.rank)
        # the lower and the upper neighbour along each axis
        self._ends = [self.shift(axis) for axis in range(len(self.shape))]

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the place of a rank.

        Raises:
            ArgumentError: If there is no such rank.
        """
        if not is_integer(rank) or not 0 <= rank < self._session.world_size:
            raise ArgumentError(f"rank={rank!r}; accepted: 0 to {self._session.world_size - 1}")
        return tuple(int(place) for place in np.unravel_index(rank, self.shape))

    def rank_at(self, coords: Sequence[int]) -> int | None:
        """Return the rank at a place, or None beyond an edge.

        Raises:
            ArgumentError: If that is not one integer for each axis.
        """
        if len(coords) != len(self.shape) or not all(map(is_integer, coords)):
            raise ArgumentError(f"coords={coords!r}; expected {len(self.shape)} integers")
        inside = []
        for place, length, ring in zip(coords, self.shape, self.periods, strict=True):
            if not ring and not 0 <= place < length:
                return None
            inside.append(place % length)
        return int(np.ravel_multi_index(inside, self.shape))

    def shift(self, axis: int, distance: int = 1) -> tuple[int | None, int | None]:
        """Return from whom a shift by ``distance`` comes, and to whom it goes; None beyond edges.

        The ``axis`` is one of the grid, and counts from the last if it is negative; a negative
        distance goes to lower ranks.
        """
        axis, ends = self._axis(axis), []
        for step in (-distance, distance):
            place = list(self.coords)
            place[axis] += step
            ends.append(self.rank_at(place))
        return ends[0], ends[1]

    def _axis(self, axis: int) -> int:
        axes = len(self.shape)
        if not is_integer(axis) or not -axes <= axis < axes:
            raise ArgumentError(f"axis={axis!r}; accepted: 0 to {axes - 1}")
        return axis % axes

    def move(self, x: _A, axis: int, distance: int = 1, *, timeout: float | None = None) -> _A:
        """Shift arrays along an axis, in place; ``x`` stays as it is where nothing comes.

        Args:
            x: Writable, contiguous array of the same shape and dtype on every rank.
            axis: Axis of the grid.
            distance: How far, in ranks; it may be negative.
            timeout: Seconds until `CollTimeout`; by default the communicator's.

        Returns:
            ``x``.
        """
        (src, dst), tag = self.shift(axis, distance), self._axis(axis)
        limit = self._session.limit(timeout)
        receive, send = self._session.start_shift(x, dst, src, tag)
        coming = [] if src is None or receive is None else [(receive, src, tag)]
        failures: list[MismatchError] = []
        self._wait(coming, [] if send is None else [send], [x], limit, failures)
        _raise_first(failures)
        return x

    def halo(self, x: _A, width: int = 1, *, timeout: float | None = None) -> _A:
        """Fill the margins of an array from the arrays of the neighbours, corners too.

        Args:
            x: Writable NumPy array whose first axes are those of the grid, with a margin of
                ``width`` at both ends of each. Across the direction of an exchange neighbours have
                equal lengths.
            width: Elements of the margin; no more than there are between the margins.
            timeout: Seconds until `CollTimeout`, for each axis.

        Returns:
            ``x``. Margins beyond an edge of the grid stay as they are.

        Raises:
            ArgumentError: If ``x`` is too small, or ``width`` is.
            MismatchError: On the rank that gets a margin of another size or dtype. What has come is
                dropped, and all margins have been exchanged; the grid stays usable.
            CollTimeout: If a neighbour is late. Nothing that comes later changes ``x``. If the
                neighbour has not taken all of a large margin, the grid is aborted.
        """
        axes = len(self.shape)
        if not isinstance(x, np.ndarray) or not x.flags.writeable:
            what = "a read-only array" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
            raise ArgumentError(f"x is {what}; a halo needs a NumPy array that can be written to")
        if not is_integer(width):
            raise ArgumentError(f"width={width!r}; expected a number of elements")
        if x.ndim < axes or min(x.shape[:axes]) < 3 * width or width < 1:
            raise ArgumentError(
                f"x has shape {x.shape}; a halo of width {width} on a grid of {axes} axes needs "
                f"at least {3 * width} elements along each of the first {axes}"
            )
        failures: list[MismatchError] = []
        edges = [slice(width, 2 * width), slice(-2 * width, -width)]
        ends = [slice(width), slice(-width, None)]
        for axis in range(axes):
            indices = [(slice(None),) * axis + (place,) for place in edges + ends]
            low, high, *margins = [x[index] for index in indices]
            into = [m if m.flags.c_contiguous else np.empty_like(m, order="C") for m in margins]
            found = self._exchange(axis, (low, high), into, timeout, failures)
            for margin, values in zip(margins, found, strict=True):
                if values is not None and values is not margin:
                    margin[...] = values
        _raise_first(failures)
        return x

    def neighbors(self) -> list[int | None]:
        """Return the neighbours: lower and upper along the first axis, then along the next one."""
        return [end for ends in self._ends for end in ends]

    def neighbor_all_gather(self, x: Any, *, timeout: float | None = None) -> list[Any]:
        """Send ``x`` to all neighbours; return theirs, of its shape, in the order of `neighbors`.

        ``timeout`` is that of `neighbor_all_to_all`.
        """
        return self.neighbor_all_to_all([x] * (2 * len(self.shape)), timeout=timeout)

    def neighbor_all_to_all(self, xs: Sequence[Any], *, timeout: float | None = None) -> list[Any]:
        """Send each neighbour its array, and get one of the same shape and dtype from each.

        Args:
            xs: Arrays in the order of `neighbors`; those beyond an edge do not matter.
            timeout: Seconds until `CollTimeout`, for each axis.

        Returns:
            What the neighbours have sent, in the order of `neighbors`; None beyond an edge.

        Raises:
            MismatchError: See `halo`.
        """
        if len(xs) != 2 * len(self.shape):
            raise ArgumentError(
                f"xs has {len(xs)} arrays; expected {2 * len(self.shape)}, one for each of "
                "neighbors(), of which some may be None"
            )
        found: list[Any] = []
        failures: list[MismatchError] = []
        for axis in range(len(self.shape)):
            pair = [np.asarray(x) for x in xs[2 * axis : 2 * axis + 2]]
            into = [np.empty_like(x, order="C") for x in pair]
            found += self._exchange(axis, pair, into, timeout, failures)
        _raise_first(failures)
        return found

    def _exchange(
        self,
        axis: int,
        edges: Sequence[Any],
        into: Sequence[Any],
        timeout: float | None,
        failures: list[MismatchError],
    ) -> list[Any]:
        """Send to the lower and the upper neighbour, and receive from both; None beyond edges.

        Messages that do not fit are dropped and added to the failures: ranks stay in step, and
        None stands for them, too.
        """
        limit, ends = self._session.limit(timeout), self._ends[axis]
        up, down = 2 * axis, 2 * axis + 1  # tags: both neighbours may be one rank
        coming = [
            (self._comm.irecv(array, end, tag), end, tag)
            for end, array, tag in zip(ends, into, (up, down), strict=True)
            if end is not None
        ]
        found: list[Any] = [None if end is None else x for end, x in zip(ends, into, strict=True)]
        going = [
            self._comm.isend(edge, end, tag)
            for end, edge, tag in zip(ends, edges, (down, up), strict=True)
            if end is not None
        ]
        for tag in self._wait(coming, going, into, limit, failures):
            found[(up, down).index(tag)] = None
        return found

    def _wait(
        self,
        coming: Sequence[tuple[Any, int, int]],
        going: Sequence[Any],
        into: Sequence[Any],
        limit: float,
        failures: list[MismatchError],
    ) -> list[int]:
        """Wait for messages, from which rank and with which tag; return tags of those dropped.

        If that fails, the caller may change the arrays. What comes later is received elsewhere, so
        that the next exchange does not get it. A peer that has not taken all of a message gets
        none, for the grid is aborted. `into` are arrays like those that are received, by tag.
        """
        until, dropped = time.monotonic() + limit, []
        try:
            for work, end, tag in coming:
                try:
                    work.wait(max(0.0, until - time.monotonic()))
                except MismatchError as error:
                    self._session.discard(end, tag)
                    failures.append(_of_this_call(error))
                    dropped.append(tag)
            wait_all(going, timeout=max(0.0, until - time.monotonic()))
        except BaseException:
            with suppress(CollError):
                for work, end, tag in coming:
                    if work.forget():
                        like = view(into[tag % len(into)], "x")
                        self._comm.irecv(new_like(like, like.array.shape), end, tag)
                for work in going:
                    work.give_up()
            raise
        return dropped

    def close(self) -> None:
        """Leave the grid; not a collective, harmless if repeated."""
        self._comm.close()

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return f"<pycoll.Grid {shape}, rank {self.rank} at {self.coords}>"


def _of_this_call(error: MismatchError) -> MismatchError:
    """Say of a message that did not fit what became of it here."""
    what = str(error).partition(". The message is kept")[0]
    return MismatchError(f"{what}. It was dropped; the grid stays usable")


def _raise_first(failures: Sequence[MismatchError]) -> None:
    if failures:
        raise failures[0]


def rings(periods: bool | Sequence[bool], axes: int) -> tuple[bool, ...]:
    """Return for each axis whether it is a ring.

    Raises:
        ArgumentError: If there is another number of them.
    """
    if np.ndim(periods) == 0:
        return (bool(periods),) * axes
    found = tuple(map(bool, np.asarray(periods).ravel()))
    if len(found) != axes:
        raise ArgumentError(f"periods={periods!r}; expected one for all axes, or {axes}")
    return found


def complete(shape: Sequence[int], n: int) -> tuple[int, ...]:
    """Return the shape of a grid of n ranks, with lengths as equal as can be in place of zeros.

    Raises:
        ArgumentError: If there is none.
    """
    if not isinstance(shape, Sequence) or not all(map(is_integer, shape)):
        raise ArgumentError(f"shape={shape!r}; expected a length for each axis, such as (2, 0)")
    lengths = [int(length) for length in shape]
    fixed = math.prod(length for length in lengths if length)
    free = [i for i, length in enumerate(lengths) if not length]
    if not lengths or min(lengths) < 0 or n % fixed or (fixed != n and not free):
        raise ArgumentError(
            f"shape={tuple(shape)} does not hold {n} ranks; 0 stands for a length to be chosen"
        )
    found, rest, factor = [1] * len(free), n // fixed, 2
    factors = []
    while rest > 1:
        if rest % factor:
            factor += 1
        else:
            factors.append(factor)
            rest //= factor
    for prime in reversed(factors):
        found[found.index(min(found))] *= prime
    for place, length in zip(free, sorted(found, reverse=True), strict=True):
        lengths[place] = length
    return tuple(lengths)
