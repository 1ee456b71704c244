"""Bringing up a group through PyTorch's store: who is where, and whose memory to open."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pycoll import _C
from pycoll.config import Config
from pycoll.errors import CollTimeout, PeerLost, TransportError
from pycoll.runtime.bootstrap import adopt, make_memfd
from pycoll.runtime.groups import open_control
from pycoll.runtime.hosts import Card
from pycoll.runtime.memory import Memory
from pycoll.runtime.reports import raising
from pycoll.torch.calls import GroupSession

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.05  # between two looks at the store
_HEAP_BYTES = 4096  # the tensors are PyTorch's: the symmetric heap stays empty


def join(store: dist.Store, rank: int, size: int, timeout_s: float) -> GroupSession:
    """Join a group whose ranks meet at a store.

    Rank 0 makes the memory and tells where it is; the others open it. Nobody goes on before
    everybody has joined, so whatever goes wrong on one rank is an error on all of them.

    Args:
        store: A store that belongs to this group alone.
        rank: Rank in the group.
        size: Number of ranks.
        timeout_s: Longest time to wait for the others, and afterwards default of every call.

    Raises:
        TransportError: If the ranks are on several hosts, or the memory cannot be had.
        CollTimeout: If ranks do not come in time, with their numbers.
        PeerLost: If a rank died on the way.
    """
    config = replace(Config.from_env(), timeout_s=timeout_s, heap_bytes=_HEAP_BYTES)
    own = [make_memfd("control"), make_memfd("heap")] if rank == 0 else []
    try:
        here = asdict(Card.own())
        meeting = _Meeting(store, rank, size, timeout_s)
        members = meeting.exchange("place", {**here, "fds": own})
        _check_one_host(members)
        pids = [member["pid"] for member in members]
        try:
            session, refusal = _open(members[0], rank, size, config), ""
        except (TransportError, MemoryError) as error:
            session, refusal = None, f"{type(error).__name__}: {error}"
        joined = meeting.exchange("joined", refusal, pids)
        bad = {r: text for r, text in enumerate(joined) if text}
        if session is None or bad:
            raise TransportError("; ".join(f"rank {r} cannot join: {t}" for r, t in bad.items()))
        return session
    finally:
        for fd in own:
            os.close(fd)


def _open(leader: dict, rank: int, size: int, config: Config) -> GroupSession:
    fds = [adopt(leader["pid"], fd) for fd in leader["fds"]]
    try:
        control = open_control(fds[0], size, config)
        heap = raising(_C.Heap, fds[1], size, config.heap_bytes)
        return GroupSession(control, Memory(heap, rank), rank, size, config)
    finally:
        for fd in fds:
            os.close(fd)


def _check_one_host(members: Sequence[dict]) -> None:
    hosts: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        hosts.setdefault(member["host"], []).append(rank)
    if len(hosts) > 1:
        places = "; ".join(
            f"ranks {ranks} on {members[ranks[0]]['name']} (boot, user and namespaces {host})"
            for host, ranks in hosts.items()
        )
        raise TransportError(
            f"the ranks of this group do not share memory: {places}. The backend serves one host; "
            "use gloo for this group, and pycoll for groups within a host"
        )


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # dead, and not yet reaped


class _Meeting:
    """Exchanges of small values between all ranks of a store."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self._store, self._rank, self._size, self._timeout_s = store, rank, size, timeout_s

    def exchange(self, topic: str, value: Any, pids: Sequence[int] = ()) -> list[Any]:
        """Return the values of all ranks; `pids`: processes that must stay alive meanwhile."""
        keys = [f"pycoll/{topic}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(value))
        until, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while not self._store.check(keys):  # a wait of a store may overrun its limit by a second
            late = time.monotonic() >= until
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            for rank in missing:
                if pids and not _is_alive(pids[rank]):
                    raise PeerLost(f"rank {rank} (process {pids[rank]}) died while it joined")
            if missing and late:
                raise CollTimeout(
                    f"rank {self._rank} waited {self._timeout_s:.3g} s for rank"
                    f"{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of "
                    f"{self._size} to join the group; none of them has come to "
                    "init_process_group or new_group"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return [json.loads(self._store.get(key)) for key in keys]
