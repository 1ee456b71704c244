"""What a measured call works on, and what must come out of it.

Inputs are integers small enough that every result is exact in the element type, whatever the order
in which it was reduced. They repeat with a prime period, so that no chunk equals its neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pycoll.cli.common.arguments import DTYPES
from pycoll.comm import Communicator
from pycoll.errors import ArgumentError
from pycoll.schedule.language.collectives import COLLECTIVES, OWN, Collective
from pycoll.types import ML_DTYPES

PERIOD = 8191
POISON = 113  # what outputs hold before a call that is checked
_LINE = 64

V_VARIANTS = ("all_gather_v", "gather_v", "scatter_v", "reduce_scatter_v", "all_to_all_v")
IN_PLACE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
"""Where the input can lie in the memory of the output, or the other way round, on every rank."""
NAMES = (*COLLECTIVES, *V_VARIANTS, "barrier")

_COMBINE = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "avg": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def element_type(name: str) -> np.dtype:
    """Return the NumPy dtype of one of pycoll's element types."""
    if name not in DTYPES:
        raise ArgumentError(f"--dtype {name} is not known; accepted: {', '.join(DTYPES)}")
    if name not in ML_DTYPES:
        try:
            return np.dtype(name)
        except TypeError:
            raise ArgumentError(f"--dtype {name}: NumPy has no such type to measure with") from None
    try:
        import ml_dtypes
    except ImportError:
        raise ArgumentError(f"--dtype {name} needs the package ml-dtypes") from None
    return np.dtype(getattr(ml_dtypes, name))


def check_op(name: str) -> None:
    """Refuse an operation of which nobody has said what must come out."""
    if name not in _COMBINE:
        known = ", ".join(_COMBINE)
        raise ArgumentError(f"--op {name} cannot be checked with NumPy; accepted: {known}")


@dataclass(frozen=True)
class Problem:
    """One collective at one size, on every rank alike."""

    name: str  # as the method of the communicator is called
    dtype: np.dtype
    op: str  # of no meaning where nothing is reduced
    blocks: tuple[int, ...]  # elements of each rank's block of the full vector
    root: int = 0  # of no meaning where there is none

    @classmethod
    def of_size(cls, name: str, dtype: np.dtype, op: str, nbytes: int, n: int) -> Problem:
        """Make the problem whose full vector has about `nbytes`, at least one element a block."""
        if name == "barrier":
            return cls(name, dtype, op, (0,) * n)
        count = max(1, nbytes // dtype.itemsize)
        if name in V_VARIANTS:  # blocks grow from rank to rank
            weight = np.arange(n) + n
            blocks = np.maximum(1, count * weight // weight.sum())
            return cls(name, dtype, op, tuple(int(b) for b in blocks))
        if name in ("all_reduce", "broadcast", "reduce", "scan", "exscan"):
            return cls(name, dtype, op, (count, *[0] * (n - 1)))
        return cls(name, dtype, op, (max(1, count // n),) * n)

    @property
    def n(self) -> int:
        """Number of ranks."""
        return len(self.blocks)

    @property
    def promise(self) -> Collective:
        """What the collective promises; a barrier promises nothing about data."""
        return COLLECTIVES.get(self.name.removesuffix("_v")) or Collective(self.name)

    @property
    def count(self) -> int:
        """Elements of the full vector."""
        return sum(self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the full vector."""
        return self.count * self.dtype.itemsize

    def block(self, rank: int) -> slice:
        """Where the block of a rank lies in the full vector."""
        start = sum(self.blocks[:rank])
        return slice(start, start + self.blocks[rank])

    def in_count(self, rank: int) -> int:
        """Elements of a rank's input; ranks without one pass an array of the same size."""
        return self.blocks[rank] if self.promise.in_layout == OWN else self.count

    def out_count(self, rank: int) -> int:
        """Elements of a rank's output, 0 for a rank without one."""
        nobody = not self.promise.sources(rank, self.n)
        if nobody or (self.promise.out_at_root and rank != self.root):
            return 0
        if self.promise.transposes:
            return self.n * self.blocks[rank]
        return self.blocks[rank] if self.promise.out_layout == OWN else self.count

    def input(self, rank: int) -> np.ndarray:
        """Return what a rank contributes."""
        return np.resize(_tile(rank, self.op).astype(self.dtype), self.in_count(rank))

    def expected(self, rank: int) -> np.ndarray | None:
        """Return what a rank must get, or None where it gets nothing."""
        promise = self.promise
        if not self.out_count(rank):
            return None
        if promise.reduces:
            parts = np.stack([_tile(r, self.op) for r in range(promise.sources(rank, self.n))])
            full = np.resize(_finish(_COMBINE[self.op].reduce(parts), self), self.count)
        elif promise.transposes:
            mine = self.block(rank)
            full = np.concatenate([self.input(r)[mine] for r in range(self.n)])
        elif promise.in_at_root:
            full = self.input(self.root)
        else:
            full = np.concatenate([self.input(r) for r in range(self.n)])
        return full[self.block(rank)] if promise.out_layout == OWN else full


def _tile(rank: int, op: str) -> np.ndarray:
    """One period of a rank's input: 1 to 4, or mostly 1 with a few 2 for products."""
    draw = np.random.default_rng(rank).integers(0, 64, PERIOD)
    return np.where(draw < 6, 2, 1) if op == "prod" else 1 + draw % 4


def _finish(exact: np.ndarray, problem: Problem) -> np.ndarray:
    values = exact.astype(problem.dtype)
    if problem.op != "avg":
        return values
    if problem.dtype.kind in "iu":  # truncated towards zero, as C does
        wide = values.astype(np.int64)
        return (np.sign(wide) * (abs(wide) // problem.n)).astype(problem.dtype)
    wide = values.astype(np.float64 if problem.dtype == np.float64 else np.float32)
    return (wide / wide.dtype.type(problem.n)).astype(problem.dtype)


@dataclass(frozen=True)
class Slots:
    """Pairs of input and output, used in turn so that no call finds its data in the cache."""

    problem: Problem
    rank: int
    pairs: tuple[tuple[np.ndarray, np.ndarray | None], ...]  # (x, out); None: it gets nothing

    @classmethod
    def make(
        cls,
        comm: Communicator,
        problem: Problem,
        count: int,
        symmetric: bool,
        in_place: bool,
        results: bool | None = None,
    ) -> Slots:
        """Allocate `count` pairs and write every page of them.

        `symmetric` inputs lie in symmetric memory, and `results`, by default as these; `in_place`
        ``out`` is ``x``, or holds it.
        """
        rank, n_out = comm.rank, problem.out_count(comm.rank)

        def pool(size: int, where: bool = symmetric) -> list[np.ndarray]:
            return _pool(comm, size, problem.dtype, count, where)

        if in_place and problem.name == "all_gather":
            pairs = [(out[problem.block(rank)], out) for out in pool(n_out)]
        elif in_place and problem.name == "reduce_scatter":
            pairs = [(x, x[problem.block(rank)]) for x in pool(problem.in_count(rank))]
        elif in_place:
            pairs = [(x, x if n_out else None) for x in pool(problem.in_count(rank))]
        else:
            where = symmetric if results is None else results
            outs = pool(n_out, where) if n_out else [None] * count
            pairs = list(zip(pool(problem.in_count(rank)), outs, strict=True))
        made = cls(problem, rank, tuple(pairs))
        made.fill()
        return made

    def fill(self) -> None:
        """Put the inputs in place, and poison the outputs."""
        values = self.problem.input(self.rank)
        for x, out in self.pairs:
            if out is not None:
                out[...] = POISON
            x[...] = values

    def wrong(self) -> int:
        """Count elements of all outputs that are not what they must be."""
        want = self.problem.expected(self.rank)
        if want is None:
            return 0
        return sum(int(np.count_nonzero(out != want)) for _, out in self.pairs if out is not None)


def _pool(
    comm: Communicator, size: int, dtype: np.dtype, count: int, symmetric: bool
) -> list[np.ndarray]:
    """Cut `count` arrays from one piece of memory, at cache lines that no power of two divides."""
    step = -(-size * dtype.itemsize // _LINE) * _LINE + 5 * _LINE
    try:
        memory = (comm.empty if symmetric else np.empty)(count * step, np.uint8)
    except (MemoryError, ValueError) as error:  # more bytes than a word counts
        raise ArgumentError(f"no room for {count} arrays of {step} bytes: {error}") from None
    return [memory[i * step : i * step + size * dtype.itemsize].view(dtype) for i in range(count)]
