"""What the plans compute: symbolic values, the post-condition, and the reduction order.

A value is an expression over the inputs, hash-consed: two cells hold the same bits, whatever the
inputs, if they hold the same expression, fold by fold. Copies make no new value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.language.promise import Promise
from pycoll.schedule.lowering.plan import FOLD_COMPLETE, FOLD_TREE
from pycoll.schedule.proof.trace import Trace

_BITS = 16  # of the counter that each rank has in `Expressions.counts`


@dataclass(frozen=True)
class Outcome:
    """What a run leaves in the outputs."""

    # ``"tree"`` or ``"rank"`` if every chunk has that shape, ``"any"`` otherwise; ``""`` if
    # nothing is reduced
    order: str
    orders: frozenset[str]  # all the orders it has; small worlds can have several
    roundings: int  # largest number of folds on a path to an output


class Expressions:
    """Values, numbered; the inputs come first, as ``rank * chunks + chunk``.

    Attributes:
        promise: What the collective promises.
        total: Number of contributions, repetitions included.
        counts: Contributions of each rank, 16 bits each in one integer; exact while total < 2^16.
        chunk: Chunk that all contributions belong to, or -1 if they differ.
        folds: Largest number of folds on a path from an input.
        shape: Number of the binary expression that is left when folds are cut into operations.
        outcomes: What is known of results, by the values of all chunks.
    """

    def __init__(self, promise: Promise) -> None:
        """Number the inputs."""
        n, chunks = promise.n, promise.chunks
        self.promise = promise
        self.inputs: int = n * chunks
        self.total: list[int] = [1] * self.inputs
        self.counts: list[int] = [1 << _BITS * rank for rank in range(n) for _ in range(chunks)]
        self.chunk: list[int] = list(range(chunks)) * n
        self.folds: list[int] = [0] * self.inputs
        self.shape: list[int] = list(range(self.inputs))
        self.outcomes: dict[tuple[int, ...], Outcome] = {}
        self._known: dict[tuple[bool, tuple[int, ...]], int] = {}
        self._shapes: dict[tuple[int, int], int] = {}

    def fold(self, tree: bool, values: tuple[int, ...]) -> int:
        """Return the value of a fold with two or more sources."""
        tree = tree and len(values) > 3  # up to three, the tree is a line
        found = self._known.get((tree, values))
        if found is None:
            found = self._known[tree, values] = len(self.total)
            chunks = {self.chunk[v] for v in values}
            self.total.append(sum([self.total[v] for v in values]))
            self.counts.append(sum([self.counts[v] for v in values]))
            self.chunk.append(chunks.pop() if len(chunks) == 1 else -1)
            self.folds.append(1 + max([self.folds[v] for v in values]))
            shapes = [self.shape[v] for v in values]
            self.shape.append(self.in_tree(shapes) if tree else self.in_line(shapes))
        return found

    def _pair(self, left: int, right: int) -> int:
        return self._shapes.setdefault((left, right), self.inputs + len(self._shapes))

    def in_line(self, shapes: list[int]) -> int:
        """Shape of a fold from left to right."""
        result = shapes[0]
        for shape in shapes[1:]:
            result = self._pair(result, shape)
        return result

    def in_tree(self, shapes: list[int]) -> int:
        """Shape of a fold along the in-order balanced tree; see docs/architecture.md, section 1."""
        extra = len(shapes) - (1 << (len(shapes).bit_length() - 1))
        pairs = [self._pair(*shapes[2 * i : 2 * i + 2]) for i in range(extra)]
        level = pairs + shapes[2 * extra :]
        while len(level) > 1:
            level = [self._pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
        return level[0]


def judge(trace: Trace, expressions: Expressions, in_fold: bool) -> tuple[Outcome, np.ndarray]:
    """Compute every output and compare it with the promise.

    Args:
        trace: The accesses of one call.
        expressions: The values, which may be known from other runs of the schedule.
        in_fold: For the operation "avg", complete folds divide; otherwise the outputs are divided
            at the end.

    Returns:
        What the outputs hold, and ``[operands]`` the value that each source has; else -1.

    Raises:
        ScheduleError: For a read of something never written, a contribution that is missing or
            counted twice, or ranks that differ in their expression.
    """
    source = _sources(trace)
    value, root = _evaluate(trace, source, expressions)
    _check_homes(trace, expressions, value)
    inner = np.flatnonzero(~trace.write & (trace.unit >= 0))
    read = np.full(len(trace.units.unit), -1)
    read[trace.operand[inner]] = value[source[inner]]
    result = np.flatnonzero(trace.result)
    cell = trace.cell[result]
    size = trace.promise.n * trace.promise.chunks
    rank, chunk = cell % size // trace.promise.chunks, cell % trace.promise.chunks
    held = value[source[result]]
    if not trace.promise.reduces:
        bad = np.flatnonzero(held != trace.promise.origin[rank, chunk])
        if len(bad):
            i = bad[0]
            want = divmod(int(trace.promise.origin[rank[i], chunk[i]]), trace.promise.chunks)
            _wrong(trace, cell[i], expressions, held[i], f"the input in[{want[0]}:{want[1]}]")
        most = max([expressions.folds[v] for v in held], default=0)
        return Outcome("", frozenset([""]), most), read
    _check_counts(trace, expressions, cell, chunk, held)
    if in_fold:
        _check_scaling(trace, root[source[result]], cell)
    return _order(trace, expressions, cell, chunk, held), read


def _sources(trace: Trace) -> np.ndarray:
    """Node each access reads, or -1: an input (its number), or a unit (inputs + its number)."""
    promise = trace.promise
    size = promise.n * promise.chunks
    initial = np.full(2 * size, -1)
    filled = np.flatnonzero(promise.in_held)
    initial[filled] = filled
    reads = np.flatnonzero(~trace.write)
    written = trace.previous[reads]
    by_unit = (written >= 0) & (trace.unit[written] >= 0)
    user = (trace.cell[reads] < 2 * size) & (written >= 0) & ~by_unit
    node = np.where(by_unit, size + trace.unit[written], -1)
    node[user] = initial[trace.cell[reads][user]]
    bad = np.flatnonzero(node < 0)
    if len(bad):
        i = bad[np.argmin(trace.when[trace.event[reads[bad]]])]
        who, piece = trace.who(trace.event[reads[i]]), trace.piece(trace.cell[reads[i]])
        what = "finds" if trace.result[reads[i]] else "reads"
        raise ScheduleError(f"{trace.title}: {who}: {what} {piece}, which nobody has written")
    result = np.full(len(trace.write), -1)
    result[reads] = node
    return result


def _evaluate(
    trace: Trace, source: np.ndarray, expressions: Expressions
) -> tuple[np.ndarray, np.ndarray]:
    """Give every node its value, and the node that it is a copy of."""
    units, size = trace.units, trace.promise.n * trace.promise.chunks
    inner = np.flatnonzero(~trace.write & (trace.unit >= 0))
    inner = inner[np.argsort(trace.operand[inner])]
    root = np.arange(size + len(units.event))
    copies = np.flatnonzero(units.nsrc == 1)
    first = np.cumsum(units.nsrc) - units.nsrc
    nodes = source[inner]
    root[size + copies] = nodes[first[copies]]
    while True:
        further = root[root]
        if np.array_equal(further, root):
            break
        root = further
    nodes = root[nodes].tolist()
    value = list(range(size)) + [-1] * len(units.event)
    reducing = np.flatnonzero(units.nsrc > 1)
    reducing = reducing[np.argsort(trace.when[units.event[reducing]], kind="stable")]
    begin, end = first[reducing].tolist(), (first + units.nsrc)[reducing].tolist()
    tree = ((units.flags[reducing] & FOLD_TREE) > 0).tolist()
    for unit, i, j, shape in zip(reducing.tolist(), begin, end, tree, strict=True):
        value[size + unit] = expressions.fold(shape, tuple([value[k] for k in nodes[i:j]]))
    return np.array(value)[root], root


def _check_homes(trace: Trace, expressions: Expressions, value: np.ndarray) -> None:
    """Check that what folds store in an output is of the chunk whose place that is.

    Chunks at the end of a vector are shorter than others, or empty, so another one would be cut
    off there. Blocks of ranks are equally long: there the place within the block counts.
    """
    size, alike = trace.promise.n * trace.promise.chunks, trace.promise.alike
    stored = np.flatnonzero(trace.write & (trace.unit >= 0) & (trace.cell < 2 * size))
    held = value[size + trace.unit[stored]]
    chunk = np.array(expressions.chunk)[held]
    home = trace.cell[stored] % trace.promise.chunks
    bad = np.flatnonzero((chunk < 0) | (chunk % alike != home % alike))
    if len(bad):
        i = stored[bad[0]]
        raise ScheduleError(
            f"{trace.title}: {trace.who(trace.event[i])}: stores "
            f"{describe(expressions, held[bad[0]])} in {trace.piece(trace.cell[i])}, the place of "
            f"chunk {home[bad[0]]}, which may be shorter; keep it in TMP"
        )


def _wrong(trace: Trace, cell: int, expressions: Expressions, value: int, want: str) -> None:
    size = trace.promise.n * trace.promise.chunks
    rank, chunk = cell % size // trace.promise.chunks, cell % trace.promise.chunks
    raise ScheduleError(
        f"{trace.title}: rank {rank}, at the end: {trace.piece(cell)} (chunk {chunk}) should hold "
        f"{want}, but holds {describe(expressions, value)}"
    )


def describe(expressions: Expressions, value: int) -> str:
    """Say which ranks contribute to a value, how often, and who is missing."""
    n, total = expressions.promise.n, expressions.total[value]
    if value < n * expressions.promise.chunks:
        rank, chunk = divmod(value, expressions.promise.chunks)
        return f"the input in[{rank}:{chunk}]"
    if total >= 1 << _BITS:
        return f"{total} contributions"
    mask = (1 << _BITS) - 1
    times = [expressions.counts[value] >> _BITS * rank & mask for rank in range(n)]
    parts = [f"rank {rank} {t} times" for rank, t in enumerate(times) if t > 1]
    missing = [rank for rank, t in enumerate(times) if not t]
    if missing:
        parts.append("nothing from rank " + ", ".join(map(str, missing)))
    if expressions.chunk[value] < 0:
        parts.append("chunks mixed")
    return "; ".join(parts) or f"the sum of chunk {expressions.chunk[value]}"


def _check_counts(
    trace: Trace,
    expressions: Expressions,
    cell: np.ndarray,
    chunk: np.ndarray,
    held: np.ndarray,
) -> None:
    promise = trace.promise
    once = [sum(1 << _BITS * rank for rank in range(count)) for count in range(promise.n + 1)]
    sources = promise.sources[cell % (promise.n * promise.chunks) // promise.chunks].tolist()
    wanted = zip(chunk.tolist(), sources, held.tolist(), strict=True)
    for i, (want, count, value) in enumerate(wanted):
        right = expressions.total[value] == count and expressions.counts[value] == once[count]
        if not right or expressions.chunk[value] != want:
            whose = "all ranks'" if count == promise.n else f"ranks 0 to {count - 1}'s"
            _wrong(trace, cell[i], expressions, value, f"{whose} chunk {want}, each once")


def _check_scaling(trace: Trace, root: np.ndarray, cell: np.ndarray) -> None:
    """Check that every output was made by a complete fold, which divides for the average."""
    unit = root - trace.promise.n * trace.promise.chunks
    complete = (trace.units.flags & FOLD_COMPLETE > 0) & (trace.units.nsrc > 1)
    bad = np.flatnonzero((unit >= 0) & ~complete[unit])
    if len(bad):
        raise ScheduleError(
            f"{trace.title}: {trace.piece(cell[bad[0]])} would not be divided for the average"
        )


def _order(
    trace: Trace,
    expressions: Expressions,
    cell: np.ndarray,
    chunk: np.ndarray,
    held: np.ndarray,
) -> Outcome:
    first: dict[tuple[int, int], int] = {}  # by number of sources, and chunk
    promise = trace.promise
    sources = promise.sources[cell % (promise.n * promise.chunks) // promise.chunks]
    for i, wanted in enumerate(zip(sources.tolist(), chunk.tolist(), strict=True)):
        before = first.setdefault(wanted, i)
        if held[before] != held[i]:
            raise ScheduleError(
                f"{trace.title}: {trace.piece(cell[before])} and {trace.piece(cell[i])} are "
                f"folded in different orders, so they can differ in their bits"
            )
    values = tuple(int(held[first[wanted]]) for wanted in sorted(first))
    if values not in expressions.outcomes:
        expressions.outcomes[values] = _outcome(expressions, sorted(first), values)
    return expressions.outcomes[values]


def _outcome(
    expressions: Expressions, wanted: list[tuple[int, int]], values: tuple[int, ...]
) -> Outcome:
    chunks = expressions.promise.chunks
    orders = []
    for name, shape_of in (("tree", expressions.in_tree), ("rank", expressions.in_line)):
        if all(
            expressions.shape[value] == shape_of([rank * chunks + c for rank in range(count)])
            for (count, c), value in zip(wanted, values, strict=True)
        ):
            orders.append(name)
    roundings = max([expressions.folds[value] for value in values], default=0)
    return Outcome(orders[0] if orders else "any", frozenset([*orders, "any"]), roundings)
