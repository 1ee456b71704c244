"""Connections between hosts: which is dead, which is slow, told from two looks at them."""

from __future__ import annotations

from dataclasses import dataclass

Counters = dict[int, dict[int, dict[str, int]]]
"""By rank and peer what `Link` of csrc/memory/board.h has."""

_SILENT_MS = 1_000  # without an answer, from where on a connection counts as dead,
_RETRIES = 2  # if so many tries went unanswered
_BUSY = 0.5  # share of the time from where on a connection is full
_SLOW = 50e6  # bytes/s: less than half of what a network of 1 Gbit/s carries
_WORSE = 4  # times as slow as its like
_BULK = 64 << 10  # bytes that tell how fast it is
_UNDER_WAY = 8 << 10  # bytes at a time; of fewer it is the round trip that takes the time


@dataclass(frozen=True)
class LinkState:
    """The way from one rank to another, between two looks.

    Attributes:
        rank, peer: Who sends, and to whom.
        rate: Bytes per second, of the time in which there was something to send.
        busy: Share of the time in which there was.
        moved: Bytes that have arrived.
        unacked: Bytes without an answer.
        silent_s: Since the system of the peer has answered.
        rtt_s: Round trip.
        retransmits: Packets that were sent again.
        retries: Of the oldest packet without an answer, so far.
    """

    rank: int
    peer: int
    rate: float
    busy: float
    moved: int
    unacked: int
    silent_s: float
    rtt_s: float
    retransmits: int
    retries: int

    @property
    def dead(self) -> bool:
        """Whether nothing gets through any more."""
        silent = self.silent_s * 1e3 >= _SILENT_MS
        return self.unacked > 0 and silent and self.retries >= _RETRIES

    def words(self) -> str:
        """Say how it is."""
        way = f"the connection from rank {self.rank} to rank {self.peer}"
        if self.dead:
            return (
                f"{way} is dead: nothing has come back for {self.silent_s:.3g} s, though "
                f"{self.unacked:,} bytes were sent, {self.retries} times"
            )
        text = f"{way} is slow: it carries {self.rate / 1e6:.3g} MB/s and is full "
        text += f"{self.busy:.0%} of the time; round trip {self.rtt_s * 1e3:.3g} ms"
        return text + (f", {self.retransmits:,} packets sent again" if self.retransmits else "")


DEAD_ADVICE = "look at the cable, the switch, the firewall and the host at its other end"
SLOW_ADVICE = "measure it (iperf3), look at its interface and at who else uses it"


def states(before: Counters, after: Counters) -> list[LinkState]:
    """Compare two looks."""
    found = []
    for rank, peers in after.items():
        for peer, now in peers.items():
            then = before.get(rank, {}).get(peer)
            if then is None:
                continue
            seconds = (now["seen_ns"] - then["seen_ns"]) * 1e-9
            busy_s = (now["busy_us"] - then["busy_us"]) * 1e-6
            moved = now["sent"] - then["sent"]
            found.append(
                LinkState(
                    rank,
                    peer,
                    rate=moved / busy_s if busy_s > 0 else 0.0,
                    busy=min(1.0, busy_s / seconds) if seconds > 0 else 0.0,
                    moved=moved,
                    unacked=now["unacked"],
                    silent_s=now["ack_age_ms"] * 1e-3,
                    rtt_s=now["rtt_us"] * 1e-6,
                    retransmits=now["retransmits"] - then["retransmits"],
                    retries=now["retries"],
                )
            )
    return found


def dead(links: list[LinkState]) -> list[LinkState]:
    """Return the connections through which nothing gets any more, the longest silent first."""
    return sorted((s for s in links if s.dead), key=lambda s: -s.silent_s)


def slow(links: list[LinkState]) -> list[LinkState]:
    """Return the connections that are full and slow, or slower than their like; the worst first."""
    full = [s for s in links if s.busy >= _BUSY and s.moved >= _BULK and not s.dead]
    full = [s for s in full if s.rate * s.rtt_s >= _UNDER_WAY]  # by Little's law
    rates = sorted(s.rate for s in links if s.moved >= _BULK)
    usual = rates[len(rates) // 2] if rates else 0.0
    found = [s for s in full if s.rate < max(_SLOW, usual / _WORSE)]
    return sorted(found, key=lambda s: s.rate)
