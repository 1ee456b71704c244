"""Who makes up the next communicator of an elastic job: decided by the launcher alone.

`pycoll.runtime.startup.meeting` is the side of the ranks, and lists the messages.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, field
from typing import Any

from pycoll.runtime.startup.bootstrap import make_memfd
from pycoll.runtime.startup.meeting import receive, send

_MOST_NAMED = 16  # processes in a text


@dataclass
class Place:
    """One process that lives and has not left the job."""

    pid: int
    line: socket.socket
    member: bool = False  # of the newest communicator
    serial: int = 0  # of its `come`; 0: it has not come
    joined: int = 0  # the newest offer that it has joined


@dataclass
class Offer:
    """Memory for a communicator, and the processes that are to join it."""

    number: int
    control: int  # descriptor
    pids: dict[int, int]  # by place, ascending: rank r is the r-th of them
    lost: dict[int, str] = field(default_factory=dict)  # places that cannot join any more, and why

    def send_losses(self) -> None:
        """Let those who are joining know who cannot, as far as that can be done now."""
        from pycoll.runtime.startup.make_groups import tell_end

        ranks = {place: rank for rank, place in enumerate(self.pids)}
        for place, how in list(self.lost.items()):
            if tell_end(self.control, ranks[place], self.pids[place], how):
                del self.lost[place]


class Meetings:
    """The places of a job, and the offers to them.

    Attributes:
        epoch: Number of the newest communicator; -1 before the first.
    """

    def __init__(self, least: int) -> None:
        """Begin; no communicator is to have fewer than `least` ranks."""
        self.least = least
        self.epoch: int = -1
        self.places: dict[int, Place] = {}
        self._offer: Offer | None = None
        self._void: list[Offer] = []  # of which somebody has still to hear that they are
        self._numbers = 0
        self._announced = 0  # the number of newcomers that members have heard

    def add(self, place: int, pid: int, line: socket.socket) -> None:
        """Take a process that has been started, and the launcher's end of its socket."""
        line.setblocking(False)
        self.places[place] = Place(pid, line)

    def remove(self, place: int, how: str) -> None:
        """Forget a process that has ended, or left the job."""
        gone = self.places.pop(place, None)
        if gone is not None:
            gone.line.close()
            self._cannot_join(place, how)

    def hear(self, place: int, line: socket.socket) -> bool:
        """Take one message of a process; return False once it has left."""
        there = self.places.get(place)
        if there is None or there.line is not line:  # another process has its place by now
            return True
        try:
            got = receive(there.line)
        except BlockingIOError:
            return True
        if got is None:
            return False
        name, serial = got[0]["name"], got[0]["serial"]
        if name == "come":
            there.serial = serial
        elif name == "withdraw":
            send(there.line, {"name": "late", "serial": serial, "text": self._who_is_late()})
            there.serial = 0
            self._cannot_join(place, "gave up waiting")
        elif self._offer is not None and got[0]["offer"] == self._offer.number:
            if name == "joined":
                there.joined = self._offer.number
            else:
                self._drop_offer()
        return True

    def _cannot_join(self, place: int, how: str) -> None:
        if self._offer is not None and place in self._offer.pids:
            self._offer.lost[place] = how
            self._drop_offer()

    def _drop_offer(self) -> None:
        """Come to another offer; who is joining this one gets an error there."""
        if self._offer is not None:
            self._void.append(self._offer)
            self._offer = None

    def consider(self) -> list[int] | None:
        """Do what is due: let ranks go, or make an offer.

        Returns:
            The places of a communicator that has been made now, or None.
        """
        self._tell_newcomers()
        offer = self._offer
        if offer is not None:
            if not all(self.places[place].joined == offer.number for place in offer.pids):
                return None
            return self._let_go(offer)
        ready = [place for place in sorted(self.places) if self.places[place].serial]
        first = self.epoch < 0  # it waits for all, the next ones for members only
        late = [p for p in self.places.values() if (p.member or first) and not p.serial]
        if late or not ready or len(ready) < self.least:
            return None
        self._make_offer(ready)
        return None

    def _make_offer(self, ready: list[int]) -> None:
        self._numbers += 1
        pids = {place: self.places[place].pid for place in ready}
        self._offer = Offer(self._numbers, make_memfd("control"), pids)
        heap = make_memfd("heap")
        for rank, place in enumerate(ready):
            there = self.places[place]
            message = {"name": "offer", "serial": there.serial, "offer": self._numbers}
            message |= {"rank": rank, "world_size": len(ready)}
            send(there.line, message, (self._offer.control, heap))
        os.close(heap)

    def _let_go(self, offer: Offer) -> list[int]:
        """All have joined: whatever happens from now on is the communicator's business."""
        self.epoch += 1
        serials = {place: self.places[place].serial for place in offer.pids}
        for place in offer.pids:
            self.places[place].member, self.places[place].serial = True, 0
        self._announced = self._newcomers()
        for place, serial in serials.items():
            message = {
                "name": "go",
                "serial": serial,
                "epoch": self.epoch,
                "count": self._announced,
            }
            send(self.places[place].line, message)
        os.close(offer.control)
        self._offer = None
        return list(offer.pids)

    def _newcomers(self) -> int:
        return sum(1 for p in self.places.values() if p.serial and not p.member)

    def _tell_newcomers(self) -> None:
        """Let members know how many wait for them."""
        count = self._newcomers()
        if count != self._announced:
            self._announced = count
            for there in self.places.values():
                if there.member:
                    send(there.line, {"name": "waiting", "count": count})

    def _who_is_late(self) -> str:
        here = sum(1 for p in self.places.values() if p.serial)
        first = self.epoch < 0  # it waits for all, the next ones for members only
        places = sorted(self.places.items())
        late = {i: p.pid for i, p in places if (p.member or first) and not p.serial}
        if late:
            call = "pycoll.init" if first else "grow"
            return f"{call}: {_named(late)} neither called it nor ended in time; call it again"
        if here >= self.least:
            return f"the last of {here} ranks has come only now. Call it again to go on"
        return (
            f"{here} ranks have come in time, and the job needs {self.least} at least; those that "
            "are started again have not called pycoll.init yet. Call it again to go on waiting"
        )

    def settle(self) -> bool:
        """Go on telling who cannot join an offer; return whether there is more to tell."""
        for offer in list(self._void):
            offer.send_losses()
            if not offer.lost:
                os.close(offer.control)
                self._void.remove(offer)
        return bool(self._void)

    def end(self, text: str) -> None:
        """Let those who have come know that there will be no communicator."""
        self._drop_offer()
        for there in self.places.values():
            if there.serial:
                send(there.line, {"name": "end", "serial": there.serial, "text": text})
                there.serial = 0

    def close(self) -> None:
        """Close all sockets and descriptors."""
        self._drop_offer()
        for offer in self._void:
            os.close(offer.control)
        for there in self.places.values():
            with contextlib.suppress(OSError):
                there.line.close()


def _named(pids: dict[int, int]) -> str:
    """Name processes by their places, of many the first ones: a message holds no more."""
    named = [f"place {place} (process {pid})" for place, pid in list(pids.items())[:_MOST_NAMED]]
    more = [f"{len(pids) - len(named)} more"] if len(pids) > len(named) else []
    return ", ".join(named + more)


def pair() -> tuple[socket.socket, Any]:
    """Return the launcher's and the rank's end of a socket that keeps messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
