"""Which ranks share a host: found out, not guessed.

Ranks that boot id, namespaces and user put on the same host are *candidates*. They share memory if
each of them can really open what the lowest of them has made; otherwise every one of them counts as
a host of its own, and MPI carries what they have to say to each other.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pycoll.errors import ArgumentError, TransportError, cut
from pycoll.runtime.startup.bootstrap import adopt, make_memfd

CARD_BYTES = 512
Exchange = Callable[[bytes], list[bytes]]  # gives every rank the cards of all ranks, by rank

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = ("ipc", "pid", "user")
_MOST_CORES = 1000


@dataclass(frozen=True)
class Card:
    """Host, process and cores of a rank."""

    host: str  # equal for ranks that may share memory
    name: str  # host name, for people
    pid: int
    cores: int = 1  # cores that it may use, one bit each, the first thousand at most

    @classmethod
    def own(cls) -> Card:
        """Describe this process.

        Raises:
            TransportError: If it cannot find out where it is, as without free descriptors.
        """
        try:
            parts = [_BOOT_ID.read_text().strip(), str(os.getuid())]
            parts += [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
        except OSError as error:
            text = f"cannot tell which host this is ({error.filename}): {error.strerror}"
            raise TransportError(text) from error
        return cls(" ".join(parts), socket.gethostname()[:64], os.getpid(), own_cores())

    @property
    def machine(self) -> str:
        """Equal for ranks whose processes one kernel runs."""
        return self.host.partition(" ")[0]

    def pack(self) -> bytes:
        """Return the card as bytes that `unpack` reads."""
        return f"{self.host}\n{self.name}\n{self.pid}\n{self.cores:x}".encode()

    @classmethod
    def unpack(cls, data: bytes) -> Card:
        """Read a card."""
        host, name, pid, cores = data.rstrip(b"\0").decode().split("\n")
        return cls(host, name, int(pid), int(cores, 16))


def own_network() -> str:
    """Return what is equal for processes that reach each other by the loopback interface."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError as error:
        text = f"cannot tell which network this is ({error.filename}): {error.strerror}"
        raise TransportError(text) from error


@dataclass(frozen=True)
class Shared:
    """Memory of the ranks of one host: descriptors that belong to the caller, or none."""

    hosts: tuple[int, ...]  # number of the host of each rank, counted from 0 in rank order
    # control_fd, heap_fd: memory of this rank's host; -1 where a rank is alone or cannot share
    control_fd: int
    heap_fd: int

    @property
    def single(self) -> bool:
        """Whether all ranks share one host."""
        return len(set(self.hosts)) == 1

    def mates(self, rank: int) -> list[int]:
        """Ranks on the host of a rank, itself included."""
        return [r for r, host in enumerate(self.hosts) if host == self.hosts[rank]]

    def close(self) -> None:
        """Give the descriptors back."""
        for fd in (self.control_fd, self.heap_fd):
            if fd >= 0:
                os.close(fd)


def number(keys: Sequence[object]) -> tuple[int, ...]:
    """Replace equal keys by equal numbers, counted in order of appearance."""
    seen: dict[object, int] = {}
    return tuple(seen.setdefault(key, len(seen)) for key in keys)


def own_cores() -> int:
    """Return the cores that this process may use, one bit each, the first thousand at most."""
    return sum(1 << core for core in os.sched_getaffinity(0) if core < _MOST_CORES)


def number_of_cores(mask: int) -> int:
    """Count the bits of `own_cores`; where all of them are beyond the first thousand, many."""
    return mask.bit_count() or _MOST_CORES


def fewest_cores(cards: Sequence[Card], hosts: Sequence[int]) -> int:
    """Return how many cores the ranks of a host may use together, where these are fewest."""
    masks: dict[int, int] = {}
    for card, host in zip(cards, hosts, strict=True):
        masks[host] = masks.get(host, 0) | card.cores
    return min(map(number_of_cores, masks.values()))


class Sharing(NamedTuple):
    """Ranks of a machine, and the cores that they may use together."""

    ranks: int
    cores: int

    @property
    def crowded(self) -> bool:
        """Whether ranks share cores."""
        return self.ranks > self.cores


def most_crowded(cards: Sequence[Card]) -> Sharing:
    """Return how cores are shared on the machine with the most ranks for each core.

    Hosts that share no memory may be on one machine: containers, and network namespaces.
    """
    masks: dict[str, int] = {}
    ranks = Counter(card.machine for card in cards)
    for card in cards:
        masks[card.machine] = masks.get(card.machine, 0) | card.cores
    shared = (Sharing(ranks[name], number_of_cores(mask)) for name, mask in masks.items())
    return max(shared, key=lambda sharing: (sharing.ranks / sharing.cores, sharing.ranks))


def candidates(cards: Sequence[Card], pretended: Sequence[int] | None = None) -> tuple[int, ...]:
    """Tell which ranks may share a host.

    Args:
        cards: Host, process and cores of each rank.
        pretended: For tests: a number for each rank; those with different ones share no host.

    Raises:
        ArgumentError: If there are not as many numbers as ranks.
    """
    if pretended is None:
        return number([card.host for card in cards])
    if len(pretended) != len(cards):
        raise ArgumentError(f"hosts={list(pretended)} are not the hosts of {len(cards)} ranks")
    return number([(card.host, i) for card, i in zip(cards, pretended, strict=True)])


def share(exchange: Exchange, rank: int, hosts: tuple[int, ...], pids: Sequence[int]) -> Shared:
    """Make and open the memory of every host; all ranks call this together.

    Raises:
        TransportError: On every rank, if one cannot make the memory of its host.
    """
    mates = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    leads = mates[0] == rank and len(mates) > 1
    own, why = _make() if leads else ((-1, -1), "")
    rows = exchange(cut(f"{own[0]} {own[1]} {why}", CARD_BYTES).encode())
    texts = [row.rstrip(b"\0").decode(errors="ignore").split(" ", 2) for row in rows]
    if failures := [f"rank {r} cannot join: {why}" for r, (_, _, why) in enumerate(texts) if why]:
        Shared(hosts, *own).close()
        raise TransportError("; ".join(failures))
    table = [(int(control), int(heap)) for control, heap, _ in texts]
    if len(mates) > 1 and not leads:
        own = _open(pids[mates[0]], *table[mates[0]])
    works = [row.rstrip(b"\0") == b"1" for row in exchange(b"%d" % (own[0] >= 0))]
    broken = {host for host, ok in zip(hosts, works, strict=True) if not ok}
    broken -= {host for host in broken if hosts.count(host) == 1}
    final = number([(h, r if h in broken else -1) for r, h in enumerate(hosts)])
    shared = Shared(final, *own)
    if hosts[rank] in broken:
        shared.close()
        return Shared(final, -1, -1)
    return shared


def share_by_texts(
    say: Callable[[str, Any], list[Any]], rank: int, hosts: tuple[int, ...], pids: Sequence[int]
) -> Shared:
    """Do what `share` does, where ranks `say` texts on topics to each other."""
    topics = (f"share{i}" for i in itertools.count())

    def exchange_bytes(data: bytes) -> list[bytes]:
        return [bytes.fromhex(row) for row in say(next(topics), data.hex())]

    return share(exchange_bytes, rank, hosts, pids)


def _make() -> tuple[tuple[int, int], str]:
    """Return two descriptors of new memory, or why there is none."""
    control = -1
    try:
        control = make_memfd("control")
        return (control, make_memfd("heap")), ""
    except TransportError as error:
        if control >= 0:
            os.close(control)
        return (-1, -1), str(error)


def _open(pid: int, control_fd: int, heap_fd: int) -> tuple[int, int]:
    try:
        control = adopt(pid, control_fd)
    except TransportError:
        return -1, -1
    try:
        return control, adopt(pid, heap_fd)
    except TransportError:
        os.close(control)
        return -1, -1
