"""Running the message plans of all ranks at once, with no buffering anywhere.

A rank posts a group of sends and receives, then waits for all of them. A message moves when both
its ends are posted, and not before: what needs more than that is not safe on every transport. There
are no wildcards, so one run decides for all interleavings.
"""

from __future__ import annotations

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.language.promise import Promise
from pycoll.schedule.lowering.plan import OPERAND, Opcode
from pycoll.schedule.lowering.table import spans
from pycoll.schedule.proof.bounds import Joined
from pycoll.schedule.proof.trace import Trace, Units, conflicts


class Exchange:
    """The messages of all plans, and when they move."""

    def __init__(self, joined: Joined) -> None:
        """Match all messages and run the plans to their end.

        Raises:
            ScheduleError: If a message has no other end, if the sizes of its ends differ, if a rank
                folds or returns while messages are under way, or if ranks wait for each other for
                ever.
        """
        op = joined.code["op"]
        wait, fold = op == Opcode.WAIT, op == Opcode.FOLD
        move = (op == Opcode.SEND) | (op == Opcode.RECV)
        waits = np.cumsum(wait)
        first = np.searchsorted(joined.rank, np.arange(len(joined.plans)))
        # ``[instructions]`` number of WAITs before each instruction of its rank
        self.group: np.ndarray = waits - wait - np.append(0, waits)[first][joined.rank]
        latest = np.maximum.accumulate(np.where(move, np.arange(len(op)), -1))
        under_way = (latest >= first[joined.rank]) & (self.group[latest] == self.group)
        joined.reject(fold & under_way, "comes while messages are under way")
        count = np.bincount(joined.rank[wait], minlength=len(joined.plans))
        joined.reject(move & (self.group == count[joined.rank]), "is never waited for")
        # ``[messages]`` instruction of each end
        self.send: np.ndarray
        self.recv: np.ndarray
        self.send, self.recv = _match(joined)
        # ``[n, groups + 1]`` wave in which each rank posts each group
        self.posted: np.ndarray = _advance(joined, self.group, count, self.send, self.recv)


def _match(joined: Joined) -> tuple[np.ndarray, np.ndarray]:
    """Pair sends and receives: between two ranks, the k-th with the k-th."""
    code, n = joined.code, len(joined.plans)
    ends = []
    for op in (Opcode.SEND, Opcode.RECV):
        at = np.flatnonzero(code["op"] == op)
        own, peer = joined.rank[at], code["peer"][at].astype(np.int64)
        pair = own * n + peer if op == Opcode.SEND else peer * n + own
        order = np.argsort(pair, kind="stable")
        ends.append((at[order], pair[order]))
    (send, out), (recv, into) = ends
    sent, taken = np.bincount(out, minlength=n * n), np.bincount(into, minlength=n * n)
    odd = np.flatnonzero(sent != taken)
    if len(odd):
        a, b = divmod(int(odd[0]), n)
        raise ScheduleError(
            f"{joined.title}: rank {a} sends {sent[odd[0]]} messages to rank {b}, "
            f"which receives {taken[odd[0]]}"
        )
    for name in ("count", "round"):
        bad = np.flatnonzero(code[name][send] != code[name][recv])
        if len(bad):
            i, j = send[bad[0]], recv[bad[0]]
            joined.fail(
                int(i),
                f"sends to rank {joined.rank[j]} with {name} {code[name][i]}, "
                f"but that expects {name} {code[name][j]}",
            )
    return send, recv


def _advance(
    joined: Joined, group: np.ndarray, count: np.ndarray, send: np.ndarray, recv: np.ndarray
) -> np.ndarray:
    """Run in waves; return the wave in which each rank posts each of its groups."""
    n = len(joined.plans)
    posted = np.full((n, int(count.max(initial=0)) + 1), -1)
    posted[:, 0] = 0
    mine, other = np.concatenate([send, recv]), np.concatenate([recv, send])
    key = joined.rank[mine] * posted.shape[1] + group[mine]
    order = np.argsort(key, kind="stable")
    other = other[order]
    size = np.bincount(key, minlength=posted.size)
    first = np.cumsum(size) - size
    peer, wanted = joined.rank[other], group[other]
    current = np.zeros(n, np.int64)
    wave = 0
    while np.any(current < count):
        wave += 1
        active = np.flatnonzero(current < count)
        at = active * posted.shape[1] + current[active]
        row, place = spans(size[at])
        item = first[at][row] + place
        blocked = np.zeros(len(active), bool)
        missing = current[peer[item]] < wanted[item]
        blocked[row[missing]] = True
        if np.all(blocked):
            ends = [
                f"rank {active[row[i]]} for rank {peer[item[i]]}" for i in np.flatnonzero(missing)
            ]
            raise ScheduleError(
                f"{joined.title}: deadlock without buffering: {', '.join(ends[:8])} "
                f"(group {current.min()})"
            )
        active = active[~blocked]
        current[active] += 1
        posted[active, current[active]] = wave
    return posted


def run_messages(joined: Joined, found: Exchange, promise: Promise, aliased: bool) -> Trace:
    """List all accesses of a run, and check that messages under way do not touch each other.

    Args:
        joined: The plans of all ranks.
        found: Their messages.
        promise: What the collective promises.
        aliased: IN and OUT are the same memory.

    Raises:
        ScheduleError: If a piece is received into while another message or fold may touch it.
    """
    code, n = joined.code, len(joined.plans)
    folds = np.flatnonzero(code["op"] == Opcode.FOLD)
    sender, receiver = joined.rank[found.send], joined.rank[found.recv]
    ready = found.posted[joined.rank[folds], found.group[folds]]
    moved = np.maximum(
        found.posted[sender, found.group[found.send]],
        found.posted[receiver, found.group[found.recv]],
    )
    size, messages = len(folds), len(found.send)
    ranks = np.concatenate([joined.rank[folds], receiver, np.tile(np.arange(n), 2)])
    rounds = np.concatenate([code["round"][folds], code["round"][found.recv], np.full(2 * n, -1)])
    end = 2 * found.posted.max(initial=0) + 2
    time = np.concatenate([2 * ready, 2 * moved + 1, np.full(n, -1), np.full(n, end)])
    when = np.empty(len(time), np.int64)
    when[np.lexsort((np.arange(len(time)), time))] = np.arange(len(time))
    copies = code[found.recv].copy()
    copies["op"], copies["nsrc"], copies["ndst"], copies["flags"] = Opcode.FOLD, 1, 1, 0
    copies["arg"] = len(joined.operands) + 2 * np.arange(messages)
    pairs = np.zeros(2 * messages, OPERAND)
    pairs[0::2] = joined.operands[code["arg"][found.send]]
    pairs[1::2] = joined.operands[code["arg"][found.recv]]
    units = Units(
        np.concatenate([code[folds], copies]),
        np.concatenate([joined.operands, pairs]),
        np.arange(size + messages),
        np.zeros(size + messages, np.int64),
    )
    users = size + messages + np.arange(2 * n)
    events = ranks, rounds, when
    trace = Trace(promise, joined.title, aliased, events, units, users, users[n:])
    conflicts(trace)
    _check_under_way(trace, found, size)
    return trace


def _check_under_way(trace: Trace, found: Exchange, folds: int) -> None:
    """Check that no piece is received into while another message of the same group touches it."""
    at = np.flatnonzero((trace.unit >= 0) & (trace.event >= folds))
    write = trace.write[at]
    message = trace.event[at] - folds
    group = np.where(write, found.group[found.recv[message]], found.group[found.send[message]])
    order = np.lexsort((~write, group, trace.cell[at]))
    cell, group, write = trace.cell[at][order], group[order], write[order]
    bad = (cell[1:] == cell[:-1]) & (group[1:] == group[:-1]) & write[:-1]
    if np.any(bad):
        i = at[order][int(np.flatnonzero(bad)[0])]
        raise ScheduleError(
            f"{trace.title}: {trace.who(trace.event[i])}: "
            f"receives into {trace.piece(trace.cell[i])} while another message that reads or "
            f"writes it is under way"
        )
