"""Bringing up a group through PyTorch's store.

On one host the ranks open the memory of one of them. On several hosts they send messages between
hosts: over MPI if an MPI launcher has started the ranks, else over TCP. Either way it is
`pycoll.runtime.sessions.message_session`: schedules, checks and results are those of one host.
"""

from __future__ import annotations

import itertools
import os
import secrets
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from pycoll import _C
from pycoll.config import Config, job_secret
from pycoll.runtime.arrays.symmetric_memory import Memory
from pycoll.runtime.calls.prepared import Prepared
from pycoll.runtime.sessions import mpi_jobs
from pycoll.runtime.sessions.message_session import MpiJob, MpiSession
from pycoll.runtime.sessions.reports import raising
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.sessions.two_level_session import TwoLevelSession
from pycoll.runtime.startup import mpi, tcp_connections
from pycoll.runtime.startup.bootstrap import adopt, make_memfd
from pycoll.runtime.startup.hosts import (
    Card,
    Sharing,
    candidates,
    most_crowded,
    own_network,
    share_by_texts,
)
from pycoll.runtime.startup.make_groups import open_control
from pycoll.runtime.startup.rendezvous import make_everywhere
from pycoll.runtime.startup.store_meeting import StoreMeeting
from pycoll.torch.backend.options import check_equal, checked
from pycoll.torch.calls.prepare import CallSites, GroupSession

_PIDS: dict[int, int] = {}
"""Processes on this host, by rank in the job, that share a group with this one."""
_HEAPS: weakref.WeakValueDictionary[tuple[int, str], Memory] = weakref.WeakValueDictionary()
"""Symmetric memory by process, and by a name that all of its ranks know it by."""
_CLOSE_S = 10.0  # longest time without progress of what peers still have to get at a close
_FAILED_S = 1.0  # likewise after a failure, which the peers know of
_NO_SECRET = (
    "this process group sends its data over TCP, and PYCOLL_SECRET is not set: whoever can read "
    "its store (with PyTorch's, whoever can reach the port of MASTER_ADDR) can pose as a rank and "
    "change results. Set PYCOLL_SECRET to the same random text on all hosts (openssl rand -hex 32)"
)


class MessageGroup(CallSites, MpiSession):
    """The session of a process group on hosts of one rank each."""

    def close(self) -> None:
        """Leave the group and end its connections."""
        failed = self._engine is not None and self._engine.failed
        super().close()
        if hasattr(self.job.api, "close"):
            self.job.api.close(_FAILED_S if failed else _CLOSE_S)


class HostsGroup(MessageGroup, TwoLevelSession):
    """The session of a process group on several hosts, some of which have several ranks."""

    def start(self, prepared: Prepared, limit: float, async_op: bool = False) -> Any:
        """Run a prepared call; the process group has threads for asynchronous ones."""
        call = self.refusing(lambda: self._binding(prepared))
        return self._run(call, prepared, limit, self.call_site)


def join(
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    ranks: Sequence[int] = (),
    options: Any = None,
) -> Session:
    """Join a group whose ranks meet at a store.

    On one host rank 0 makes the memory, and the others open it. No rank goes on before all have
    joined, so whatever goes wrong on one rank is an error on all of them. `timeout_s` limits the
    wait for the others, and is the default of every call; `ranks` are the numbers in the whole job,
    `options` the ``pg_options``, the same on every rank.

    Raises:
        ArgumentError: If the options are none of this backend's, or differ.
        TransportError: If the memory cannot be had, or hosts cannot reach each other.
        CollTimeout: If ranks do not come in time, with their numbers.
        PeerLost: If a rank died on the way.
        PeerLeft: If a rank cannot join, and why.
    """
    rendezvous = StoreMeeting(store, rank, size, timeout_s, "init_process_group or new_group")
    own: list[int] = []
    try:
        with rendezvous.refusing():
            config = replace(Config.from_env(), timeout_s=timeout_s, strict="call")
            secret = job_secret()
            own += [make_memfd(name) for name in ("control", "heap") if rank == 0]
            heaps = _heaps_here()
            facts = _facts(own, list(heaps), options)
        numbers = list(ranks) or list(range(size))
        if not dist.is_initialized():  # this will be the group of all ranks
            _PIDS.clear()
        rendezvous.pids = {r: _PIDS[k] for r, k in enumerate(numbers) if k in _PIDS}
        members = rendezvous.meet(facts)
        check_equal([member["order"] for member in members])
        cards = _cards(members)
        rendezvous.pids = {r: c.pid for r, c in enumerate(cards) if c.host == cards[rank].host}
        _PIDS.update({numbers[r]: pid for r, pid in rendezvous.pids.items()})
        places = candidates(cards)
        if len(set(places)) > 1:
            return _join_hosts(rendezvous.exchange, members, places, rank, config, store, secret)
        return make_everywhere(
            lambda: _open(members, heaps, rank, config, most_crowded(cards)),
            lambda text: rendezvous.exchange("joined", text),
        )
    finally:
        for fd in own:
            os.close(fd)


def _facts(fds: list[int], heaps: list[str], options: Any) -> dict[str, Any]:
    """Return what the other ranks have to know of this one: its place, memory and options."""
    order, network = checked(options).order, own_network()
    facts = {"fds": fds, "heaps": heaps, "heap": secrets.token_hex(8), "order": order}
    return {**asdict(Card.own()), **facts, "network": network}


def _cards(members: list[dict]) -> list[Card]:
    return [Card(m["host"], m["name"], m["pid"], m["cores"]) for m in members]


def _heaps_here() -> dict[str, Memory]:
    """Return the symmetric memory that this process has, by name; a child made by fork has none."""
    return {name: heap for (pid, name), heap in list(_HEAPS.items()) if pid == os.getpid()}


def _open(
    members: list[dict], heaps: dict[str, Memory], rank: int, config: Config, sharing: Sharing
) -> GroupSession:
    """Open the memory of a group; it shares the heap of a group that has all of its ranks."""
    leader, size = members[0], len(members)
    fds = [adopt(leader["pid"], fd) for fd in leader["fds"]]
    try:
        control = open_control(fds[0], size, config)
        known = (name for name in leader["heaps"] if all(name in m["heaps"] for m in members))
        name = next(known, None)
        if name is None:
            memory = Memory(raising(_C.Heap, fds[1], size, config.heap_bytes), rank)
            _HEAPS[os.getpid(), leader["heap"]] = memory
        else:
            memory = heaps[name]
        session = GroupSession(control, memory, rank, size, config)
        session.use(None, sharing)
        return session
    finally:
        for fd in fds:
            os.close(fd)


def _join_hosts(
    exchange: tcp_connections.Exchange,
    members: list[dict],
    places: tuple[int, ...],
    rank: int,
    config: Config,
    store: dist.Store,
    secret: str,
) -> MessageGroup:
    """Join a group on several hosts; `places` are the hosts that its ranks may share."""
    cards, word = _cards(members), members[0]["heap"]  # the latter tells it from other groups
    one_host = len({m["network"] for m in members}) == 1
    shared = share_by_texts(exchange, rank, places, [card.pid for card in cards])
    names = [f"rank {r} (process {card.pid} on {card.name})" for r, card in enumerate(cards)]
    try:
        limit = config.timeout_s
        over_mpi = _find_mpi_job(exchange, cards, shared.hosts, limit)
        ends: tcp_connections.Sockets = []
        if over_mpi is None:
            if rank == 0 and not secret:
                warnings.warn(_NO_SECRET, RuntimeWarning, stacklevel=2)
            place = rank, names, _host_of(store), limit, store
            ends = tcp_connections.connect(exchange, *place, secret=secret, one_host=one_host)

        def over_tcp() -> MpiJob:
            api = tcp_connections.open_api(ends, names, limit)
            return MpiJob(api, None, cards, shared.hosts, "TCP", word=word)

        def make() -> MpiSession:
            place = *(over_mpi or (over_tcp(), 0)), rank, cards, shared, config
            session = mpi.on_hosts(*place, (MessageGroup, HostsGroup))
            session.use(None, most_crowded(cards))
            return session

        return make_everywhere(make, lambda text: exchange("joined", text))
    finally:
        shared.close()


def _host_of(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", "")


def _find_mpi_job(
    exchange: tcp_connections.Exchange, cards: list[Card], hosts: tuple[int, ...], limit: float
) -> tuple[MpiJob, int] | None:
    """Return the MPI job of all ranks, and the number of a new group in it; None if there is none.

    MPI has no time limits, so no rank begins its calls before all are about to.
    """
    if not all(exchange("begin-mpi", mpi.can_begin(len(cards), dist.is_torchelastic_launched()))):
        return None
    world, refusal = None, ""
    try:
        world = mpi.world()
    except Exception as error:
        refusal = str(error)
    found = exchange("mpi-rank", [world.rank, world.size] if world is not None else [-1, refusal])
    ranks = tuple(entry[0] for entry in found)
    if min(ranks) < 0 or len({entry[1] for entry in found}) > 1 or len(set(ranks)) < len(ranks):
        return None
    job = mpi_jobs.find_group(mpi.load(), world, ranks, cards, hosts, exchange, limit)
    topics = (f"context{i}" for i in itertools.count())
    most = lambda number: max(exchange(next(topics), number))  # noqa: E731
    return job, job.new_context(most, world.rank == ranks[0])
