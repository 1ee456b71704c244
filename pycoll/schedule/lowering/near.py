"""The folds that one rank's plan is made of: its own, and what others do to the same memory.

A rank has to know of an access of another rank's fold

* if the memory is its own,
* if it writes that memory, or
* if it reads that memory and the access is a write,
* if it reads an input and the access reads the result in its place: staged, both share a slot.

So that costs what the rank does, not what the world does, others' folds are listed with these
accesses only. They are found in one of two ways. A relative schedule is the same for every rank, so
one sorts all its pieces by the places that they can reach, and looks each place up. Any other one
is gone through round by round, for the vector of all ranks.
"""

from __future__ import annotations

import numpy as np

from pycoll.schedule.ir import Schedule
from pycoll.schedule.language.relative import RelativeLines
from pycoll.schedule.lowering.lookup import looked_up
from pycoll.schedule.lowering.places import Found, Places
from pycoll.schedule.lowering.rounds import own_and_others
from pycoll.schedule.lowering.table import (
    FoldTable,
    Lines,
    check_slots,
    expand,
    lines_of,
    resolve_acc,
)


def near_table(schedule: Schedule, rank: int, *, whole: bool = False) -> FoldTable:
    """List a rank's folds, and others' folds as far as they touch what it touches.

    Args:
        schedule: What to list.
        rank: The one rank.
        whole: List all pieces of others' folds over several chunks, if these touch its memory.

    Raises:
        ScheduleError: If a scratch slot, a chunk count or a root is out of range.
    """
    relative = schedule.relative
    if relative is None:
        lines = lines_of(schedule, np.array([rank]))
        own, other = own_and_others(schedule, lines, rank, whole)
    else:
        lines = _lines_at(relative, rank)
        own = expand(schedule, lines, np.array([rank]))
        other = looked_up(relative, Places(schedule, own, rank), whole)
    table = _joined(own, lines, other)
    check_slots(schedule, table)
    return resolve_acc(table, schedule)


def _lines_at(lines: RelativeLines, rank: int) -> Lines:
    """Return the folds of one rank."""
    arity = lines.nsrc + lines.ndst
    return Lines(
        lines.round,
        lines.tree,
        lines.nsrc,
        lines.ndst,
        np.cumsum(arity) - arity,
        lines.count[:, None],
        np.repeat(np.arange(len(arity)), arity),
        lines.buffer,
        (lines.rank + lines.moves * rank)[:, None],
        (lines.chunk + lines.moves_chunk * rank)[:, None],
    )


def _joined(own: FoldTable, lines: Lines, found: Found) -> FoldTable:
    """Put own folds and those parts of others' together."""
    order = np.lexsort((found.piece, found.offset, found.owner, found.line))
    found = Found(*(column[order] for column in found))
    fold = found.line * own.n + found.owner
    differs = np.ones(len(fold), bool)
    same = (fold[1:] == fold[:-1]) & (found.offset[1:] == found.offset[:-1])
    differs[1:] = ~same | (found.piece[1:] != found.piece[:-1])
    found = Found(*(column[differs] for column in found))
    starts = np.ones(len(found.line), bool)
    fold = found.line * own.n + found.owner
    starts[1:] = (fold[1:] != fold[:-1]) | (found.offset[1:] != found.offset[:-1])
    head = np.flatnonzero(starts)
    line = found.line[head]
    source = found.piece < (lines.first + lines.nsrc)[found.line] if len(head) else starts
    unit = np.cumsum(starts) - 1
    nsrc = np.bincount(unit[source], minlength=len(head))
    arity = np.diff(np.append(head, len(unit)))
    return FoldTable(
        n=own.n,
        lines=own.lines,
        line_round=own.line_round,
        owner=np.concatenate([own.owner, found.owner[head]]),
        line=np.concatenate([own.line, line]),
        tree=np.concatenate([own.tree, lines.tree[line]]),
        nsrc=np.concatenate([own.nsrc, nsrc]),
        ndst=np.concatenate([own.ndst, arity - nsrc]),
        combines=np.concatenate([own.combines, lines.nsrc[line] > 1]),
        width=np.concatenate([own.width, found.width[head]]),
        rank=np.concatenate([own.rank, found.rank]),
        buffer=np.concatenate([own.buffer, found.buffer]),
        chunk=np.concatenate([own.chunk, found.chunk]),
    )
