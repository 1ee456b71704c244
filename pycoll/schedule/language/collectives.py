"""What each collective promises: where data is at the start, and what must be where at the end.

Chunks are numbered over the *full* vector: the whole buffer of an all-reduce or a broadcast, the
concatenation over ranks for the others. A buffer with layout OWN holds only the owner's share,
chunks ``[rank * m, (rank + 1) * m)`` with ``m = chunks / n``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pycoll.errors import ScheduleError

FULL, OWN = "full", "own"


@dataclass(frozen=True)
class Collective:
    """Shape and promise of one collective.

    Attributes:
        name: Its name.
        in_layout: FULL or OWN, for the input.
        out_layout: FULL or OWN, for the output.
        in_at_root: Only the root has an input.
        out_at_root: Only the root has an output.
        reduces: Contributions of all ranks are combined.
        transposes: Output chunk j of rank i is input chunk i of rank j.
    """

    name: str
    in_layout: str = FULL
    out_layout: str = FULL
    in_at_root: bool = False
    out_at_root: bool = False
    reduces: bool = False
    transposes: bool = False

    @property
    def rooted(self) -> bool:
        """Whether the collective has a root."""
        return self.in_at_root or self.out_at_root

    def holds(self, layout: str, rank: int, chunk: int, n: int, chunks: int) -> bool:
        """Whether a buffer of that layout holds a chunk on a rank."""
        share = chunks // n
        return layout == FULL or rank * share <= chunk < (rank + 1) * share

    def inputs(self, n: int, chunks: int, root: int) -> Iterator[tuple[int, int]]:
        """Yield every (rank, chunk) that holds data at the start."""
        for rank in range(n):
            if not self.in_at_root or rank == root:
                for chunk in range(chunks):
                    if self.holds(self.in_layout, rank, chunk, n, chunks):
                        yield rank, chunk

    def outputs(self, n: int, chunks: int, root: int) -> Iterator[tuple[int, int, list]]:
        """Yield every (rank, chunk, contributions) that must hold data at the end.

        Contributions are (source rank, source chunk) pairs, in rank order, each wanted once.
        """
        for rank in range(n):
            if self.out_at_root and rank != root:
                continue
            for chunk in range(chunks):
                if self.holds(self.out_layout, rank, chunk, n, chunks):
                    yield rank, chunk, self._sources(rank, chunk, n, chunks, root)

    def _sources(self, rank: int, chunk: int, n: int, chunks: int, root: int) -> list:
        if self.reduces:
            return [(source, chunk) for source in range(n)]
        share = chunks // n
        if self.transposes:
            return [(chunk // share, rank * share + chunk % share)]
        if self.in_at_root:
            return [(root, chunk)]
        return [(chunk // share, chunk)]


COLLECTIVES = {
    spec.name: spec
    for spec in (
        Collective("all_reduce", reduces=True),
        Collective("reduce_scatter", out_layout=OWN, reduces=True),
        Collective("all_gather", in_layout=OWN),
        Collective("broadcast", in_at_root=True),
        Collective("reduce", out_at_root=True, reduces=True),
        Collective("gather", in_layout=OWN, out_at_root=True),
        Collective("scatter", out_layout=OWN, in_at_root=True),
        Collective("all_to_all", transposes=True),
    )
}


def order_of(collective: str, order: str | None) -> str:
    """Refuse names that do not exist; return the order of a reduction that says none."""
    if not isinstance(collective, str) or collective not in COLLECTIVES:
        known = ", ".join(COLLECTIVES)
        raise ScheduleError(f"collective={collective!r} is not known; known: {known}")
    reduces = COLLECTIVES[collective].reduces
    if order not in ((None, "tree", "rank", "any") if reduces else (None, "")):
        known = "tree, rank and any" if reduces else f"none, {collective} reduces nothing"
        raise ScheduleError(f"order={order!r} is not known; known: {known}")
    return "any" if reduces else ""
