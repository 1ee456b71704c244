"""The stages of each collective over hosts; see `pycoll.algorithms.two_level.stages`.

H is the number of hosts, p that of ranks of a host, m the size of the full vector, b that of a
block, which belongs to one rank (to one pair of ranks in an all_to_all).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pycoll.algorithms.two_level.stages import (
    NONE,
    Hosts,
    Item,
    Stage,
    TwoLevels,
    across_stage,
    fetch_stage,
    fold_stage,
)
from pycoll.schedule.ir import IN, OUT, TMP, Algorithm, Buffer

Params = dict[str, int]


def _column(across: Algorithm, params: Params, hosts: Hosts) -> Callable[[int], range]:
    chunks = across.schedule(hosts.count, **params).chunks
    return lambda column: range(column * chunks, (column + 1) * chunks)


def _whole(
    hosts: Hosts, across: Algorithm, params: Params, buffer: Buffer, target: Buffer
) -> tuple:
    """Return the places of columns, and the stage between hosts, of one vector for all ranks."""
    places = _column(across, params, hosts)
    count = len(places(0))
    stage = across_stage(hosts, across, params, 1, count, buffer, target)
    for column, team in enumerate(hosts.teams()):
        stage.gives[list(team)] = stage.takes[list(team)] = places(column)
    return places, stage, count * hosts.columns


def _columns_of(hosts: Hosts, places: Callable, host: int) -> Iterator[tuple[int, int]]:
    """Yield owner and place of every piece of the vector that a host has."""
    for column in range(hosts.columns):
        for place in places(column):
            yield hosts.owner(host, column), place


def fetch_columns(hosts: Hosts, places: Callable) -> Stage:
    """Let every rank fetch all columns from their owners on its host."""
    items = (
        (owner, place, dict.fromkeys(group, place))
        for host, group in enumerate(hosts.groups)
        for owner, place in _columns_of(hosts, places, host)
    )
    return fetch_stage(hosts, items, OUT, OUT)


def all_reduce(hosts: Hosts, across: Algorithm, params: Params) -> TwoLevels:
    """Combine in hosts, all-reduce columns between them, fetch the columns.

    Cost: what an all-reduce among hosts sends, 2 (H - 1) / H * m out of every host.
    """
    places, stage, chunks = _whole(hosts, across, params, OUT, OUT)
    before = fold_stage(hosts, places, OUT)
    return TwoLevels(before, stage, None, fetch_columns(hosts, places), chunks, 0)


def reduce(hosts: Hosts, across: Algorithm, params: Params) -> TwoLevels:
    """Combine in hosts, reduce columns to the root's host, where the root fetches them.

    Cost: m out of every host but the root's, if the algorithm between hosts sends no more.
    """
    places, stage, chunks = _whole(hosts, across, params, TMP, TMP)
    before = fold_stage(hosts, places, TMP)
    home = hosts.of[hosts.root]
    for column, team in enumerate(hosts.teams()):
        stage.gives[list(team)] = range(len(places(column)))
        stage.takes[list(team)] = NONE
        stage.takes[team[home]] = range(len(places(column)))
    items = (
        (owner, place % len(places(0)), {hosts.root: place})
        for owner, place in _columns_of(hosts, places, home)
    )
    after = fetch_stage(hosts, items, TMP, OUT)
    return TwoLevels(before, stage, None, after, chunks, len(places(0)))


def broadcast(hosts: Hosts, across: Algorithm, params: Params) -> TwoLevels:
    """Share out the columns on the root's host, broadcast them between hosts, fetch them.

    Cost: what a broadcast among hosts sends, m into every host but the root's.
    """
    places, stage, chunks = _whole(hosts, across, params, OUT, OUT)
    home = hosts.of[hosts.root]
    first = (
        (hosts.root, place, {owner: place}) for owner, place in _columns_of(hosts, places, home)
    )
    before = fetch_stage(hosts, first, IN, OUT)
    return TwoLevels(before, stage, None, fetch_columns(hosts, places), chunks, 0)


def all_gather(hosts: Hosts, across: Algorithm, params: Params) -> TwoLevels:
    """Gather in hosts, all-gather columns between them, fetch the blocks of other hosts.

    Cost: (H - 1) p b out of every host, if the algorithm between hosts sends no more.
    """
    size = hosts.depth
    own = ((r, r, dict.fromkeys(hosts.groups[h], r)) for r, h in enumerate(hosts.of))
    before = fetch_stage(hosts, own, IN, OUT)
    stage = across_stage(hosts, across, params, size, hosts.count * size, OUT, OUT)
    for column, team in enumerate(hosts.teams()):
        for host, owner in enumerate(team):
            for t, rank in hosts.ranks(host, column):
                stage.gives[owner, host * size + t] = rank
                stage.takes[list(team), host * size + t] = rank
    items = (
        (hosts.owner(here, column), rank, dict.fromkeys(group, rank))
        for here, group in enumerate(hosts.groups)
        for there in range(hosts.count)
        for column in range(hosts.columns)
        for _, rank in hosts.ranks(there, column)
        if there != here
    )
    return TwoLevels(before, stage, None, fetch_stage(hosts, items, OUT, OUT), hosts.n, 0)


def reduce_scatter(hosts: Hosts, across: Algorithm, params: Params) -> TwoLevels:
    """Combine in hosts, reduce-scatter columns between them, fetch the own block.

    Cost: the blocks of all ranks of other hosts out of every host.
    """
    size = hosts.depth
    total = hosts.count * size

    def places(column: int) -> list[int]:
        result = [NONE] * total
        for host in range(hosts.count):
            for t, rank in hosts.ranks(host, column):
                result[host * size + t] = rank
        return result

    before = fold_stage(hosts, places, TMP)
    stage = across_stage(hosts, across, params, size, total, TMP, OUT if hosts.all_own else TMP)
    items: list[Item] = []
    for column, team in enumerate(hosts.teams()):
        wanted = places(column)
        for host, owner in enumerate(team):
            stage.gives[owner] = [NONE if r == NONE else s for s, r in enumerate(wanted)]
            for t, rank in hosts.ranks(host, column):
                slot = host * size + t
                stage.takes[owner, slot] = rank if hosts.all_own else slot
                if not hosts.all_own:
                    items.append((owner, slot, {rank: rank}))
    return TwoLevels(before, stage, None, fetch_stage(hosts, items, TMP, OUT), hosts.n, total)


def all_to_all(hosts: Hosts, across: Algorithm, params: Params) -> TwoLevels:
    """Hand blocks for other hosts to owners, exchange them between hosts, fetch the own ones.

    Cost: p (n - p) b out of every host, in one message for each other host and column.
    """
    size = hosts.depth * hosts.most  # slots of a pair of hosts in a column
    total = hosts.count * size
    target = OUT if hosts.all_own else TMP
    stage = across_stage(hosts, across, params, size, total, TMP, target)
    first: list[Item] = []
    last: list[Item] = []
    for column, team in enumerate(hosts.teams()):
        for here, owner in enumerate(team):
            for there in set(range(hosts.count)) - {here}:
                for t, wanted in hosts.ranks(there, column):
                    for i, rank in enumerate(hosts.groups[here]):
                        slot = there * size + t * hosts.most + i
                        stage.gives[owner, slot] = slot
                        first.append((rank, wanted, {owner: slot}))
                for t, wanted in hosts.ranks(here, column):
                    for i, rank in enumerate(hosts.groups[there]):
                        slot = there * size + t * hosts.most + i
                        stage.takes[owner, slot] = rank if hosts.all_own else total + slot
                        if not hosts.all_own:
                            last.append((owner, total + slot, {wanted: rank}))
    local = (
        (rank, other, {other: rank}) for group in hosts.groups for rank in group for other in group
    )
    return TwoLevels(
        fetch_stage(hosts, first, IN, TMP),
        stage,
        fetch_stage(hosts, local, IN, OUT),
        fetch_stage(hosts, last, TMP, OUT),
        hosts.n,
        total if hosts.all_own else 2 * total,
    )


def gather(hosts: Hosts, across: Algorithm, params: Params) -> TwoLevels:
    """Gather in hosts, then between them, at one rank each.

    Cost: p b out of every host but the root's.
    """
    home, size = hosts.of[hosts.root], hosts.most
    stage = across_stage(hosts, across, params, size, hosts.count * size, TMP, OUT)
    items: list[Item] = []
    for host, group in enumerate(hosts.groups):
        leader = hosts.owner(host, 0)
        for i, rank in enumerate(group):
            items.append((rank, rank, {leader: rank if host == home else i}))
            if host != home:
                stage.gives[leader, host * size + i] = i
                stage.takes[hosts.root, host * size + i] = rank
    before = replace(fetch_stage(hosts, items, IN, TMP), target=hosts.buffers(TMP, at_root=OUT))
    return TwoLevels(before, stage, None, fetch_stage(hosts, (), OUT, OUT), hosts.n, size)


def scatter(hosts: Hosts, across: Algorithm, params: Params) -> TwoLevels:
    """Scatter between hosts, at one rank each, then in hosts.

    Cost: p b into every host but the root's.
    """
    home, size = hosts.of[hosts.root], hosts.most
    stage = across_stage(hosts, across, params, size, hosts.count * size, IN, TMP)
    items: list[Item] = []
    for host, group in enumerate(hosts.groups):
        leader = hosts.owner(host, 0)
        for i, rank in enumerate(group):
            items.append((leader, rank if host == home else i, {rank: rank}))
            if host != home:
                stage.gives[hosts.root, host * size + i] = rank
                stage.takes[leader, host * size + i] = i
    after = replace(fetch_stage(hosts, items, TMP, OUT), source=hosts.buffers(TMP, at_root=IN))
    before = fetch_stage(hosts, (), OUT, OUT)
    return TwoLevels(before, stage, None, after, hosts.n, size)


_PLANS = all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter
PLANS: dict[str, Callable[[Hosts, Algorithm, Params], TwoLevels]] = {
    plan.__name__: plan for plan in _PLANS
}
