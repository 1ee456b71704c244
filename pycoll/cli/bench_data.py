"""What a measured call works on, and what must come out of it.

Inputs are integers small enough that every result is exact in the element type, whatever the order
in which it was reduced. They repeat with a prime period, so that no chunk equals its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll.comm import Communicator
from pycoll.errors import ArgumentError
from pycoll.schedule.collectives import COLLECTIVES, OWN, Collective

PERIOD = 8191
POISON = 113  # what outputs hold before a call that is checked
_LINE = 64

V_VARIANTS = ("all_gather_v", "gather_v", "scatter_v", "reduce_scatter_v", "all_to_all_v")
NAMES = (*COLLECTIVES, *V_VARIANTS, "barrier")

_EXACT: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "sum": lambda parts, n: parts.sum(axis=0),
    "prod": lambda parts, n: parts.prod(axis=0),
    "min": lambda parts, n: parts.min(axis=0),
    "max": lambda parts, n: parts.max(axis=0),
    "avg": lambda parts, n: parts.sum(axis=0),
    "and": lambda parts, n: np.bitwise_and.reduce(parts, axis=0),
    "or": lambda parts, n: np.bitwise_or.reduce(parts, axis=0),
    "xor": lambda parts, n: np.bitwise_xor.reduce(parts, axis=0),
}


def element_type(name: str) -> np.dtype:
    """Return the NumPy dtype of a name, ``bfloat16`` included.

    Raises:
        ArgumentError: The name is not known.
    """
    try:
        if name == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(name)
    except (ImportError, TypeError) as error:
        raise ArgumentError(f"--dtype {name}: {error}") from None


@dataclass(frozen=True)
class Problem:
    """One collective at one size, on every rank alike.

    Attributes:
        name: Collective, as the method of the communicator is called.
        dtype: Element type.
        op: Reduction operation; of no meaning where nothing is reduced.
        blocks: Elements of each rank's block of the full vector.
        root: Root rank, of no meaning where there is none.
    """

    name: str
    dtype: np.dtype
    op: str
    blocks: tuple[int, ...]
    root: int = 0

    @classmethod
    def of_size(cls, name: str, dtype: np.dtype, op: str, nbytes: int, n: int) -> Problem:
        """Make the problem whose full vector has about `nbytes`, at least one element a block."""
        count = max(1, nbytes // dtype.itemsize)
        if name in V_VARIANTS:  # blocks grow from rank to rank
            weight = np.arange(n) + n
            blocks = np.maximum(1, count * weight // weight.sum())
            return cls(name, dtype, op, tuple(int(b) for b in blocks))
        if name in ("all_reduce", "broadcast", "reduce"):
            return cls(name, dtype, op, (count, *[0] * (n - 1)))
        return cls(name, dtype, op, (max(1, count // n),) * n)

    @property
    def n(self) -> int:
        """Number of ranks."""
        return len(self.blocks)

    @property
    def promise(self) -> Collective:
        """What the collective promises."""
        return COLLECTIVES[self.name.removesuffix("_v")]

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
        if self.promise.out_at_root and rank != self.root:
            return 0
        if self.promise.transposes:
            return self.n * self.blocks[rank]
        return self.blocks[rank] if self.promise.out_layout == OWN else self.count

    def input(self, rank: int) -> np.ndarray:
        """Return what a rank contributes."""
        return _repeat(_tile(rank, self.op), self.in_count(rank)).astype(self.dtype)

    def expected(self, rank: int) -> np.ndarray | None:
        """Return what a rank must get, or None where it gets nothing."""
        promise = self.promise
        if not self.out_count(rank):
            return None
        if promise.reduces:
            parts = np.stack([_tile(r, self.op) for r in range(self.n)])
            full = _repeat(_finish(_EXACT[self.op](parts, self.n), self), self.count)
        elif promise.transposes:
            mine = self.block(rank)
            full = np.concatenate([self.input(r)[mine] for r in range(self.n)])
        elif promise.in_at_root:
            full = self.input(self.root)
        else:
            full = np.concatenate([self.input(r) for r in range(self.n)])
        return full[self.block(rank)] if promise.out_layout == OWN else full

    def in_place(self) -> bool:
        """Whether input and output can be the same memory without a copy of the whole input."""
        return self.name in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


def _tile(rank: int, op: str) -> np.ndarray:
    """One period of a rank's input: 1 to 4, or mostly 1 with a few 2 for products."""
    draw = np.random.default_rng(rank).integers(0, 64, PERIOD)
    return np.where(draw < 6, 2, 1) if op == "prod" else 1 + draw % 4


def _repeat(tile: np.ndarray, count: int) -> np.ndarray:
    return np.resize(tile, count)


def _finish(exact: np.ndarray, problem: Problem) -> np.ndarray:
    if problem.op != "avg":
        return exact.astype(problem.dtype)
    if problem.dtype.kind in "iu":
        return (exact.astype(problem.dtype) // problem.n).astype(problem.dtype)
    wide = np.dtype(np.float64 if problem.dtype == np.float64 else np.float32)
    return (exact.astype(wide) / wide.type(problem.n)).astype(problem.dtype)


@dataclass(frozen=True)
class Slots:
    """Pairs of input and output, used in turn so that no call finds its data in the cache.

    Attributes:
        problem: What they are for.
        rank: Whose they are.
        pairs: Arrays ``(x, out)``; ``out`` is None on a rank without a result.
    """

    problem: Problem
    rank: int
    pairs: tuple[tuple[np.ndarray, np.ndarray | None], ...]

    @classmethod
    def make(
        cls, comm: Communicator, problem: Problem, count: int, symmetric: bool, in_place: bool
    ) -> Slots:
        """Allocate `count` pairs and write every page of them.

        Args:
            comm: Owner of the symmetric memory.
            problem: What they are for.
            count: Number of pairs.
            symmetric: Whether to take symmetric memory.
            in_place: Whether ``out`` is ``x``, or holds it.
        """
        rank = comm.rank
        new_in = _pool(comm, problem.in_count(rank), problem.dtype, count, symmetric)
        new_out = _pool(comm, problem.out_count(rank), problem.dtype, count, symmetric)
        if not in_place:
            outs = new_out if problem.out_count(rank) else [None] * count
            made = cls(problem, rank, tuple(zip(new_in, outs, strict=True)))
        elif problem.name == "all_gather":
            mine = problem.block(rank)
            made = cls(problem, rank, tuple((out[mine], out) for out in new_out))
        elif problem.name == "reduce_scatter":
            mine = problem.block(rank)
            made = cls(problem, rank, tuple((x, x[mine]) for x in new_in))
        else:
            has_out = problem.out_count(rank) > 0
            made = cls(problem, rank, tuple((x, x if has_out else None) for x in new_in))
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
    memory = (comm.empty if symmetric else np.empty)(count * step, np.uint8)
    return [
        memory[i * step : i * step + size * dtype.itemsize].view(dtype) for i in range(count)
    ]
