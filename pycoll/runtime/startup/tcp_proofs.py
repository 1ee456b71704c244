"""Proofs that both ends of a TCP connection know the secret of their job: HMAC-SHA256.

Every rank signs how it can be reached before it writes that to the store, and checks what the
others have written: another secret, or an entry that somebody has changed, is an error on every
rank before any of them dials. The ends of a connection then answer each other's challenge, a random
number, so that nothing seen earlier is of use. What is signed names the whole table of the job,
both ranks and who dials, so that no answer fits anywhere else.

Without a secret the same is signed with a key that everybody knows. That shows mistakes, and shuts
out only those who cannot read the store.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Sequence
from typing import NamedTuple

from pycoll.errors import TransportError

OTHER_SECRET = "pycoll/other secret"  # key of a store: who called with one
CHALLENGE_BYTES = PROOF_BYTES = 32
_WORD_BYTES = 16
_ENDS = struct.Struct("!II")  # the dialled rank, the dialling one


def new_word() -> str:
    """Draw the word of a rank."""
    return secrets.token_hex(_WORD_BYTES)


class Endpoint(NamedTuple):
    """How a rank can be reached."""

    port: int
    addresses: list[str]  # its addresses; the likeliest first
    word: str  # drawn at random, as hexadecimal digits: tells callers from strangers
    trouble: str = ""  # why it cannot be reached; empty if it can
    proof: str = ""  # that it knows the secret

    @classmethod
    def read(cls, entry: object) -> Endpoint:
        """Return what a rank has written to the store.

        Raises:
            TransportError: If no rank writes this.
        """
        try:
            place = cls(*entry)  # type: ignore[misc]
            texts = (place.word, place.trouble, place.proof, *place.addresses)
            whole = type(place.port) is int and isinstance(place.addresses, list)
            whole = whole and all(isinstance(text, str) for text in texts) and place.proof.isascii()
            if whole and len(bytes.fromhex(place.word)) == (0 if place.trouble else _WORD_BYTES):
                if place.trouble or (place.addresses and 0 < place.port < 1 << 16):
                    return place
        except (TypeError, ValueError):
            pass
        raise TransportError(f"the store has {str(entry)[:100]!r} where a rank writes its address")


class Proofs:
    """Makes and checks the proofs of one rank."""

    def __init__(self, secret: str, rank: int, names: Sequence[str]) -> None:
        self._secret, self._rank, self._names = secret, rank, names
        self._table = b""

    def sign(self, place: Endpoint) -> Endpoint:
        """Return this rank's entry with its proof."""
        return place._replace(proof=_of_place(self._secret, self._rank, place))

    def check(self, places: Sequence[Endpoint]) -> None:
        """Take the entries of all ranks for the table of the job.

        Raises:
            TransportError: If some were not made with this rank's secret.
        """
        wrong = [r for r, p in enumerate(places) if not _fits(self._secret, r, p)]
        if wrong:
            bare = [r for r in wrong if _fits("", r, places[r])]
            whose = ", ".join(self._names[r] for r in bare or wrong)
            if bare:
                text = f"PYCOLL_SECRET is set on {self._names[self._rank]}, and not on {whose}"
            elif self._secret:
                text = (
                    f"PYCOLL_SECRET of {self._names[self._rank]} is not that of {whose}, or "
                    "somebody has changed what they wrote to the store"
                )
            else:
                text = f"PYCOLL_SECRET is set on {whose}, and not on {self._names[self._rank]}"
            raise TransportError(f"{text}: set it to the same text for every rank")
        self._table = hashlib.sha256(json.dumps([list(p) for p in places]).encode()).digest()

    def answer(self, dialled: int, dialling: int, challenges: bytes) -> bytes:
        """Return what only the dialled rank says; `challenges` are those of both ends."""
        return self._say(b"answer", dialled, dialling, challenges)

    def confirm(self, dialled: int, dialling: int, challenges: bytes) -> bytes:
        """Return what only the dialling rank says."""
        return self._say(b"confirm", dialled, dialling, challenges)

    def _say(self, role: bytes, dialled: int, dialling: int, challenges: bytes) -> bytes:
        ends = _ENDS.pack(dialled, dialling)
        return keyed(self._secret, b"\0".join((role, self._table + ends + challenges)))


def same(said: bytes, expected: bytes) -> bool:
    """Compare two proofs, in a time that says nothing about where they differ."""
    return hmac.compare_digest(said, expected)


def keyed(secret: str, data: bytes) -> bytes:
    """Return what only those can say about some data who know the secret."""
    key = hashlib.sha256(b"pycoll " + secret.encode("utf-8", "surrogateescape")).digest()
    return hmac.digest(key, data, "sha256")


def _of_place(secret: str, rank: int, place: Endpoint) -> str:
    text = json.dumps([rank, *place._replace(proof="")])
    return keyed(secret, b"place\0" + text.encode()).hex()


def _fits(secret: str, rank: int, place: Endpoint) -> bool:
    return same(place.proof.encode(), _of_place(secret, rank, place).encode())
