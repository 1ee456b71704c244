"""How ranks meet at a store that all can reach, such as that of PyTorch: small values for all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pycoll.errors import CollTimeout, PeerLeft, PeerLost, TransportError, in_words
from pycoll.runtime.startup.tcp_connections import Board
from pycoll.runtime.startup.tcp_proofs import OTHER_SECRET

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.05  # between two looks at the store
_REFUSED = "pycoll/refused"
_REFUSING_S = 5.0  # in which ranks that come learn that this one refuses to join


class StoreMeeting:
    """Exchanges of small values between all ranks of a store.

    Attributes:
        pids: Processes of this host, by rank, that must stay alive meanwhile.
    """

    def __init__(self, store: Board, rank: int, size: int, timeout_s: float, call: str) -> None:
        """Prepare; `call` is what ranks call that come, in words."""
        self._store, self._rank, self._size, self._timeout_s = store, rank, size, timeout_s
        self._call = call
        self._nonce = secrets.token_hex(8)
        self.pids: Mapping[int, int] = {}
        self._round = ""  # in which all these ranks have met

    def meet(self, value: Any) -> list[Any]:
        """Return the values of all ranks, all of which are there now.

        A store may outlive its users: torchrun keeps its own when it starts ranks again. To tell
        the values of dead ranks from those of their successors, every rank puts a random number
        beside its value, and reports what it has read. When all report the same, with the number of
        this rank in it, nobody has read anything old.
        """
        values, reports = self._keys("card"), self._keys("met")
        self._store.set(values[self._rank], json.dumps([self._nonce, value, self._size]))
        read: list[bytes] = []

        def missing() -> list[int]:
            nonlocal read
            self._check_refused()
            self._check_alone(self._store.get(values[self._rank]))
            if absent := self._absent(values):
                return absent
            found = [self._store.get(key) for key in values]
            if found != read:
                read, self._round = found, hashlib.sha256(b" ".join(found)).hexdigest()[:16]
                self._store.set(reports[self._rank], self._round)
            others = [self._store.get(key) if self._store.check([key]) else b"" for key in reports]
            return [rank for rank, text in enumerate(others) if text.decode() != self._round]

        self._wait(missing)
        return [json.loads(text)[1] for text in read]

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """If the body fails, tell the other ranks that this one will not join, and why."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Exception):  # the store may be what has failed
                self._refuse(in_words(error))
            raise

    def _refuse(self, why: str) -> None:
        """Tell the ranks, by their random numbers, so that it is not for their successors."""
        until, reached = time.monotonic() + min(self._timeout_s, _REFUSING_S), None
        others = [key for r, key in enumerate(self._keys("card")) if r != self._rank]
        while reached is None or (len(reached) < len(others) and time.monotonic() < until):
            here = [self._store.get(key) for key in others if self._store.check([key])]
            nonces = [json.loads(text)[0] for text in here]
            if nonces != reached:
                self._store.set(_REFUSED, json.dumps([self._rank, why, nonces]))
                reached = nonces
            time.sleep(_LAST_PAUSE_S)

    def _check_refused(self) -> None:
        if self._store.check([_REFUSED]):
            rank, why, nonces = json.loads(self._store.get(_REFUSED))
            if self._nonce in nonces:
                raise PeerLeft(f"rank {rank} cannot join: {why}")

    def _check_alone(self, card: bytes) -> None:
        """Notice that another process has come as this rank."""
        if json.loads(card)[0] != self._nonce:
            raise TransportError(
                f"another process has come as rank {self._rank} of {self._size} to {self._call}, "
                "too: a process that a rank starts inherits its variables, such as RANK, and is "
                "no rank"
            )

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        keys = self._keys(topic)
        self._store.set(keys[self._rank], json.dumps(value))
        self._wait(lambda: self._absent(keys))
        return [json.loads(self._store.get(key)) for key in keys]

    def _absent(self, keys: list[str]) -> list[int]:
        if self._store.check(keys):
            return []
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def _keys(self, topic: str) -> list[str]:
        return [f"pycoll{self._round}/{topic}/{rank}" for rank in range(self._size)]

    def _wait(self, look: Callable[[], list[int]]) -> None:
        """Wait until `look` at the store finds no rank missing."""
        until, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while missing := look():  # a wait of a store may overrun its limit by a second
            late = time.monotonic() >= until
            for rank in missing:
                pid = self.pids.get(rank)
                if pid is not None and not _is_alive(pid):
                    raise PeerLost(f"rank {rank} (process {pid}) died while it joined")
            if late:
                raise CollTimeout(
                    f"rank {self._rank} waited {self._timeout_s:.3g} s for {_ranks(missing)} of "
                    f"{self._size} to join the group; {self._why(missing)}"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _why(self, missing: list[int]) -> str:
        """Say what is known of ranks that have been waited for in vain."""
        keys = [f"pycoll/card/{rank}" for rank in missing]
        cards = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        came = {r: json.loads(card)[2] for r, card in zip(missing, cards, strict=True) if card}
        odd = [f"rank {r} has come as one of {n} ranks" for r, n in came.items() if n != self._size]
        if odd:
            return f"{', '.join(odd)}: all ranks have to be of the same group"
        absent = [rank for rank in missing if rank not in came]
        if not absent:
            return f"{_ranks(missing)} came to {self._call}, and then did not answer"
        who = "none of them has" if len(absent) == len(missing) else f"{_ranks(absent)} have not"
        turned_away = ""
        if self._store.check([OTHER_SECRET]):  # a rank, or a stranger
            caller = self._store.get(OTHER_SECRET).decode()
            turned_away = f"; a process at {caller} called with another PYCOLL_SECRET"
        return f"{who} come to {self._call}{turned_away}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # dead, and not yet reaped
