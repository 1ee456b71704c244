"""Ranks on several hosts without MPI: they meet at a store, and send messages over TCP.

Who has started them says so in the environment (`bootstrap.Place`). Ranks of one host share memory.
"""

from __future__ import annotations

import secrets
import warnings
from dataclasses import asdict
from typing import Any

from pycoll.config import VERSION, Config, job_secret
from pycoll.errors import ArgumentError, TransportError
from pycoll.runtime.sessions.message_session import MpiJob
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.startup import mpi, tcp_connections
from pycoll.runtime.startup.bootstrap import Place
from pycoll.runtime.startup.hosts import Card, candidates, own_network, share_by_texts
from pycoll.runtime.startup.rendezvous import make_everywhere
from pycoll.runtime.startup.store_meeting import StoreMeeting
from pycoll.runtime.startup.tcp_store import StoreClient, StoreServer

_LAST_WORDS_S = 2.0  # in which the others can read at the store why this rank has failed
_NO_SECRET = (
    "the ranks of this job send their data over TCP, and PYCOLL_SECRET is not set: whoever reaches "
    "the port of rank 0 can pose as a rank and change results. Set PYCOLL_SECRET to the same "
    "random text on all hosts (openssl rand -hex 32)"
)


def join(place: Place, config: Config | ArgumentError) -> Session:
    """Join the ranks of a job; a collective of all of them.

    Raises:
        CollTimeout: If ranks do not come in time, with their numbers.
        TransportError: If hosts cannot reach each other, or have another version or secret.
        ArgumentError: If a setting is wrong, or ranks have different ones.
        PeerLost, PeerLeft: If another rank died, or cannot join.
    """
    limit = config.timeout_s if isinstance(config, Config) else Config.timeout_s
    secret = job_secret()
    server = StoreServer(place.port, secret, place.size) if place.rank == 0 else None
    host = "localhost" if place.rank == 0 else place.host
    store = None
    try:
        store = StoreClient(host, place.port, secret, limit)
        meeting = StoreMeeting(store, place.rank, place.size, limit, "pycoll.init")
        with meeting.refusing():
            config = _usable(config)
            card, network = Card.own(), own_network()
        own = {**asdict(card), "network": network, "version": VERSION, "settings": repr(config)}
        own["word"] = secrets.token_hex(8)
        members = meeting.meet(own)
        _compare(members)
        return _join(meeting, members, place, config, store, secret)
    except BaseException:
        if store is not None:
            store.close()
        if server is not None:
            server.close(_LAST_WORDS_S)
        raise
    finally:
        if store is not None:
            store.close()


def _usable(config: Config | ArgumentError) -> Config:
    if isinstance(config, ArgumentError):
        raise config
    if config.transport == "mpi":
        raise ArgumentError("transport='mpi': start the ranks with mpiexec")
    return config


def _compare(members: list[dict[str, Any]]) -> None:
    """Refuse ranks that differ in what must be the same."""
    for name, words in (("version", "versions"), ("settings", "settings")):
        said: dict[str, list[int]] = {}
        for rank, member in enumerate(members):
            said.setdefault(member[name], []).append(rank)
        if len(said) > 1:
            texts = (
                f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))} on "
                f"{', '.join(dict.fromkeys(members[q]['name'] for q in r))}: {t}"
                for t, r in said.items()
            )
            kind = TransportError if name == "version" else ArgumentError
            raise kind(f"ranks have different {words} of pycoll: {'; '.join(texts)}")


def _join(
    meeting: StoreMeeting,
    members: list[dict[str, Any]],
    place: Place,
    config: Config,
    store: StoreClient,
    secret: str,
) -> Session:
    rank = place.rank
    cards = [Card(m["host"], m["name"], m["pid"], m["cores"]) for m in members]
    meeting.pids = {r: card.pid for r, card in enumerate(cards) if card.host == cards[rank].host}
    pids = [card.pid for card in cards]
    shared = share_by_texts(meeting.exchange, rank, candidates(cards), pids)
    names = [f"rank {r} (process {card.pid} on {card.name})" for r, card in enumerate(cards)]
    try:
        ends: tcp_connections.Sockets = []
        if not shared.single:
            if rank == 0 and not secret:
                warnings.warn(_NO_SECRET, RuntimeWarning, stacklevel=7)
            one_host = len({m["network"] for m in members}) == 1
            reach = {"secret": secret, "one_host": one_host}
            towards, limit = "" if rank == 0 else place.host, config.timeout_s
            ends = tcp_connections.connect(
                meeting.exchange, rank, names, towards, limit, store, **reach
            )

        def make() -> Session:
            if shared.single:
                return mpi.on_one_host(shared, rank, len(cards), config)
            api = tcp_connections.open_api(ends, names, config.timeout_s)
            word = members[0]["word"]
            job = MpiJob(api, None, cards, shared.hosts, "TCP", word=word, owned=True)
            return mpi.on_hosts(job, 0, rank, cards, shared, config)

        return make_everywhere(make, lambda text: meeting.exchange("joined", text))
    finally:
        shared.close()
