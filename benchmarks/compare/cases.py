"""What is compared: cases, each measured at many sizes."""

from typing import NamedTuple

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = tuple(8 << k for k in range(0, 24, 1))  # 8 B to 64 MiB
MESSAGE_SIZES = (8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
FEW_SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)


class Case(NamedTuple):
    """A collective under one set of circumstances; `nbytes` of a cell are those of the full vector.

    Attributes:
        collective: Name of the collective.
        n: Number of ranks.
        dtype: Element type.
        in_place: The result lies in the input; of an all-gather, the input in the result. A
            broadcast is always so.
        rotating: Arrays are used in turn, more of them than a cache holds.
    """

    collective: str
    n: int
    dtype: str = "float32"
    in_place: bool = False
    rotating: bool = False

    def cells(self, sizes):
        """Return the case as the ranks get it."""
        how = {"in_place": self.in_place, "rotating": self.rotating}
        return [{"collective": self.collective, "bytes": nbytes, **how} for nbytes in sizes]

    @property
    def title(self):
        place = "in place" if self.in_place else "out of place"
        place = "" if self.collective == "broadcast" else f", {place}"
        buffers = "many arrays in turn" if self.rotating else "the same arrays again"
        return f"{self.collective}, {self.dtype}, {self.n} ranks{place}, {buffers}"


def quick():
    """Return the cases of ten minutes, in the order of their interest."""
    cases = [Case("all_reduce", 2, in_place=True, rotating=r) for r in (False, True)]
    cases += [Case("all_reduce", 4, in_place=True, rotating=r) for r in (False, True)]
    cases += [Case("all_reduce", 8, in_place=True)]
    cases += [Case(name, 2, rotating=r) for name in COLLECTIVES[1:] for r in (False, True)]
    cases += [Case("all_gather", 2, in_place=True)]
    cases += [Case("all_reduce", 2, "bfloat16", in_place=True)]
    return cases


def messages():
    """Return the cases in which pycoll sends messages over MPI."""
    cases = [Case("all_reduce", 2, in_place=True, rotating=r) for r in (False, True)]
    cases += [Case(name, 2) for name in COLLECTIVES[1:]]
    return [*cases, Case("all_gather", 2, in_place=True)]


def full():
    return [
        Case(name, n, dtype, place, rotating)
        for n in (2, 4, 8)
        for dtype in ("float32", "float64", "bfloat16")
        for name in COLLECTIVES
        for place in ((True, False) if name in ("all_reduce", "all_gather") else (False,))
        for rotating in (False, True)
    ]
