"""Groups whose ranks are on several hosts: shared memory inside hosts, messages between them.

Messages travel over MPI where an MPI launcher has started the ranks, and else over TCP. Either way
`pycoll.runtime.sessions.message_session` sends them: schedules, checks and bits of one host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pycoll.config import Config
from pycoll.runtime.calls.prepared import Prepared
from pycoll.runtime.selection.topology import Topology
from pycoll.runtime.sessions import mpi_jobs
from pycoll.runtime.sessions.message_session import MpiJob, MpiSession
from pycoll.runtime.sessions.two_level_session import TwoLevelSession
from pycoll.runtime.startup import mpi, tcp_connections
from pycoll.runtime.startup.hosts import Card, fewest_cores, share
from pycoll.runtime.startup.rendezvous import make_everywhere
from pycoll.torch.calls.call_sites import Placed

_PATIENCE_S = 10.0  # without progress of what others still have to get when this rank closes
_FAILED_S = 1.0  # likewise after a failure, of which they know
Exchange = Callable[[str, Any], list[Any]]


class _Joined(Placed, MpiSession):
    """The session of a process group on several hosts."""

    def close(self) -> None:
        """Leave the group and end its connections."""
        failed = self._engine is not None and self._engine.failed
        super().close()
        if hasattr(self.job.api, "close"):
            self.job.api.close(_FAILED_S if failed else _PATIENCE_S)


class MessageGroup(_Joined):
    """A session on hosts of one rank each."""


class HostsGroup(_Joined, TwoLevelSession):
    """A session on several hosts, some of which have several ranks."""

    def start(self, prepared: Prepared, limit: float, async_op: bool = False) -> Any:
        """Run a prepared call; the process group has a thread for those in the background."""
        return self._run(prepared, limit, self.place)


def join_hosts(
    exchange: Exchange,
    cards: list[Card],
    places: tuple[int, ...],
    rank: int,
    config: Config,
    store: dist.Store,
) -> MessageGroup:
    """Join a group on several hosts; a collective.

    Args:
        exchange: Gathers values from all ranks.
        cards: What each rank says about itself.
        places: Which of them may share a host; see `pycoll.runtime.startup.hosts.candidates`.
        rank: Rank in the group.
        config: Settings.
        store: Store of the group, to find the way to the others.

    Raises:
        TransportError: If ranks cannot reach each other, or the memory cannot be had.
    """
    topics = (f"share{i}" for i in itertools.count())

    def exchange_bytes(data: bytes) -> list[bytes]:
        return [bytes.fromhex(row) for row in exchange(next(topics), data.hex())]

    shared = share(exchange_bytes, rank, places, [card.pid for card in cards])
    names = [f"rank {r} (process {card.pid} on {card.name})" for r, card in enumerate(cards)]
    try:
        limit = config.timeout_s
        over_mpi = _way_over_mpi(exchange, cards, shared.hosts, limit)
        ends: tcp_connections.Sockets = []
        if over_mpi is None:
            ends = tcp_connections.connect(exchange, rank, names, _host_of(store), limit, store)
        topology = Topology(shared.hosts, rank, fewest_cores(cards, shared.hosts))

        def make() -> MpiSession:
            job, context = over_mpi or (_socket_job(ends, names, cards, shared.hosts), 0)
            place = job, list(range(len(cards))), rank, context, config
            if topology.useful:
                return HostsGroup(*place, mpi.open_node(topology, shared, config), topology)
            return MessageGroup(*place)

        return make_everywhere(make, lambda text: exchange("joined", text))
    finally:
        shared.close()


def _host_of(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", "")


def _socket_job(
    ends: tcp_connections.Sockets, names: list[str], cards: list[Card], hosts: tuple[int, ...]
) -> MpiJob:
    return MpiJob(tcp_connections.open_api(ends, names), None, cards, hosts, "TCP")


def _way_over_mpi(
    exchange: Exchange, cards: list[Card], hosts: tuple[int, ...], limit: float
) -> tuple[MpiJob, int] | None:
    """Find the job and the number of a new group in it; None if its ranks are of no one MPI job.

    Nobody begins with what MPI puts no limit to before all ranks are about to do the same.
    """
    if not all(exchange("begin-mpi", mpi.can_begin(len(cards), dist.is_torchelastic_launched()))):
        return None
    world, refusal = None, ""
    try:
        world = mpi.world()
    except Exception as error:
        refusal = str(error)
    said = exchange("mpi-rank", [world.rank, world.size] if world is not None else [-1, refusal])
    ranks = tuple(entry[0] for entry in said)
    if min(ranks) < 0 or len({entry[1] for entry in said}) > 1 or len(set(ranks)) < len(ranks):
        return None
    job = mpi_jobs.find_group(mpi.load(), world, ranks, cards, hosts, exchange, limit)
    topics = (f"context{i}" for i in itertools.count())
    most = lambda number: max(exchange(next(topics), number))  # noqa: E731
    return job, job.new_context(most, world.rank == ranks[0])
