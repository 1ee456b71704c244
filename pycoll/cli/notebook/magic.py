"""``%%ranks`` and ``%ranks`` of IPython and Jupyter."""

from __future__ import annotations

import atexit
from collections.abc import Iterable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from pycoll.cli.notebook.pool import Outcome, Pool
from pycoll.errors import CollError

DEFAULT = 4


@magics_class
class Ranks(Magics):
    """The magics, and the ranks that they have started."""

    def __init__(self, shell: Any) -> None:
        """Begin without ranks; the first cell starts them."""
        super().__init__(shell)
        self.pool: Pool | None = None
        atexit.register(self.end)

    def end(self) -> None:
        """End the ranks, if there are any."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    @magic_arguments()
    @argument("what", nargs="?", help="number of ranks, or: restart, stop")
    @argument(
        "--get",
        action="append",
        default=[],
        metavar="NAME",
        help="""bring a variable of the
        ranks into the notebook after the cell, as a list by rank""",
    )
    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> None:
        """Run a cell on ranks that stay alive: ``%%ranks 4``.

        The ranks start with the first cell, or with another number. Each has its own variables,
        which stay from cell to cell, and ``comm``, the communicator of all. Lines that a rank
        prints come with its number; so does the value of the last line. ``%ranks restart`` begins
        anew, ``%ranks stop`` ends the ranks, ``%ranks`` tells how many there are.
        """
        given = parse_argstring(self.ranks, line)
        if given.what in ("restart", "stop") and cell is None:
            n = self.pool.n if self.pool else DEFAULT
            self.end()
            if given.what == "restart":
                self.pool = Pool(n)
            return
        if given.what is not None and not (given.what.isdecimal() and int(given.what)):
            raise UsageError(f"%ranks takes a number of ranks, restart or stop, not {given.what!r}")
        if cell is None and given.what is None:
            print(f"{self.pool.n} ranks" if self.pool and self.pool.alive else "no ranks")
            return
        try:
            pool = self.started(int(given.what) if given.what else None)
            if cell is not None:
                self.run(pool, cell)
            for name in given.get:
                self.shell.push({name: pool.get(name)})  # type: ignore[union-attr]
        except RanksError:
            raise
        except CollError as error:
            raise RanksError(str(error)) from None

    def started(self, n: int | None) -> Pool:
        """Return the ranks, `n` of them; those there are if it is None."""
        if self.pool is not None and (not self.pool.alive or n not in (None, self.pool.n)):
            if self.pool.alive:
                print(f"{n} ranks in place of {self.pool.n}: their variables are gone")
            self.end()
        if self.pool is None:
            self.pool = Pool(n or DEFAULT)
        return self.pool

    def run(self, pool: Pool, cell: str) -> None:
        """Run a cell, and show what ranks print and how they end."""
        ends: dict[int, Outcome] = {}
        interrupted = False
        try:
            for rank, told in pool.run(cell):
                if isinstance(told, Outcome):
                    ends[rank] = told
                else:
                    print(f"[{rank}] {told}" if rank >= 0 else told, flush=True)
        except KeyboardInterrupt:
            interrupted = True
        for among, value in grouped({r: end.value for r, end in ends.items() if end.value}):
            print(f"[{among}] {value}")
        failed = {rank: end for rank, end in ends.items() if end.error is not None}
        if not failed:
            return
        error = failure(failed) if not interrupted else RanksError("KeyboardInterrupt on the ranks")
        try:
            pool.renew()
        except CollError as worse:
            raise RanksError(f"{error}\n{worse}", error.traceback) from None
        raise error


class RanksError(CollError):
    """What went wrong with ranks, shown without the frames of this package."""

    def __init__(self, text: str, traceback: str = "") -> None:
        """`traceback` comes first."""
        super().__init__(text)
        self.traceback = traceback

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows; it asks for them by this name."""
        return [*self.traceback.splitlines(), str(self)]


def failure(failed: dict[int, Outcome]) -> RanksError:
    """Return the error of a cell: the traceback is that of the rank where it began."""
    causes = [rank for rank in sorted(failed) if not failed[rank].consequence]
    first = causes[0] if causes else min(failed)
    lines = [""]
    for among, text in grouped({rank: short(end) for rank, end in failed.items()}):
        lines.append(f"rank{'s' * (not among.isdecimal())} {among}: {text}")
    return RanksError("\n".join(lines), failed[first].traceback)


def short(end: Outcome) -> str:
    """Return the error of a rank; of one that tells of another rank's, its first half."""
    text = end.error or ""
    return text.partition(" (process ")[0] if end.consequence else text


def grouped(by_rank: dict[int, str]) -> Iterable[tuple[str, str]]:
    """Yield equal texts once, each with the ranks that have it: "0-2, 5"."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(by_rank):
        ranks.setdefault(by_rank[rank], []).append(rank)
    for text, group in ranks.items():
        yield spans(group), text


def spans(ranks: list[int]) -> str:
    """Return "0-2, 5" for 0, 1, 2, 5."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def load(shell: Any) -> None:
    """Add the magics to a shell."""
    shell.register_magics(Ranks(shell))
