"""What each collective promises: where data is at the start, and what must be where at the end.

Chunks are numbered over the *full* vector: the whole buffer of an all-reduce or a broadcast, the
concatenation over ranks for the others. A buffer with layout OWN holds only the owner's share,
chunks ``[rank * m, (rank + 1) * m)`` with ``m = chunks / n``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pycoll.errors import ScheduleError

FULL, OWN = "full", "own"


@dataclass(frozen=True)
class Collective:
    """Shape and promise of one collective."""

    name: str
    in_layout: str = FULL  # FULL or OWN, for the input
    out_layout: str = FULL  # FULL or OWN, for the output
    in_at_root: bool = False  # only the root has an input
    out_at_root: bool = False  # only the root has an output
    reduces: bool = False  # contributions of all ranks are combined
    transposes: bool = False  # output chunk j of rank i is input chunk i of rank j
    # rank r gets what the first r + prefix ranks contribute, and has no output if these are none
    prefix: int | None = None

    @property
    def rooted(self) -> bool:
        """Whether the collective has a root."""
        return self.in_at_root or self.out_at_root

    @property
    def one_way(self) -> bool:
        """Whether some ranks need nothing of some others: a root does not, nor those that feed it.

        Nor do the first ranks of a prefix reduction.
        """
        return self.rooted or self.prefix is not None

    def sources(self, rank: int, n: int) -> int:
        """Return how many ranks, from rank 0 on, contribute to a reduction's output of a rank."""
        return n if self.prefix is None else rank + self.prefix


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
        Collective("scan", reduces=True, prefix=1),
        Collective("exscan", reduces=True, prefix=0),
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
