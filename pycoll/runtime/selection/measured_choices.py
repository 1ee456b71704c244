"""Using measured times: which table a communicator gets, the same on every rank."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from pycoll.config import SYMMETRIC, Config, tuning_path
from pycoll.errors import ArgumentError
from pycoll.runtime.calls.prepared import CallRequest
from pycoll.runtime.selection.tuning_table import Tuning, fingerprint
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.startup.hosts import Sharing, most_crowded, number_of_cores, own_cores
from pycoll.types import Kind

_MASK_BYTES = 128  # of the cores of a host
_AGAIN = "measure again with `pycoll tune`"


def agree(session: Session) -> Session:
    """Give a new session what chooses its algorithms; a collective of its ranks.

    That is the table of rank 0, if there is one, and how ranks share cores; from then on NumPy's
    arrays are symmetric, if the settings say so. Only rank 0 looks for a file, as its own settings
    say; all others get what it has read, so the ranks cannot differ.

    Raises:
        ArgumentError: On every rank, if rank 0 was given a table that cannot be used, or settings
            differ.
    """
    found = ""
    if session.rank == 0:
        try:
            found = load(session)
        except (ArgumentError, Warning) as error:  # a warning that this program has made an error
            found = f"!{error}"
    if session.world_size > 1:
        found = _of_rank_0(session, found)
    if found.startswith("!"):
        session.close()
        raise ArgumentError(found[1:])
    try:
        sharing = _sharing(session)
    except ArgumentError:
        session.close()
        raise
    session.use(Tuning.parse(found) if found else None, sharing)
    if session.config.symmetric == "numpy":
        session.end_numpy = session.memory.serve_numpy()
    return session


def _sharing(session: Session) -> Sharing:
    """Return how the ranks of a machine share its cores, the same on every rank.

    Raises:
        ArgumentError: On every rank, if NumPy's arrays are to be symmetric on some of them only.
    """
    if session.plans.messages:
        return most_crowded(session.job.cards)
    mask = np.frombuffer(own_cores().to_bytes(_MASK_BYTES, "little"), np.uint64)
    own = session.config.symmetric
    words = np.append(mask, np.uint64(1 << SYMMETRIC.index(own)))
    if session.world_size > 1:
        _run(session, Kind.ALL_REDUCE, words, "or")
    if words[-1] & (words[-1] - np.uint64(1)):
        raise ArgumentError(
            f"symmetric={own!r} on rank {session.rank} and something else on others: set it, or "
            "PYCOLL_SYMMETRIC, alike on all ranks"
        )
    cores = number_of_cores(int.from_bytes(words[:-1].tobytes(), "little"))
    return Sharing(session.world_size, cores)


def _run(session: Session, kind: Kind, array: np.ndarray, op: str = "sum") -> None:
    """Run a call that nobody remembers: it was chosen without what is agreed on here."""
    prepared = session.prepare(CallRequest(kind, op, 0, None), array, array)
    session.start(prepared, session.config.timeout_s, False)


def _of_rank_0(session: Session, text: str) -> str:
    """Return the text of rank 0."""
    data = np.frombuffer(text.encode(), np.uint8).copy()
    size = np.array([data.size])
    _run(session, Kind.BROADCAST, size)
    if not size[0]:
        return ""
    data = data if session.rank == 0 else np.empty(size[0], np.uint8)
    _run(session, Kind.BROADCAST, data)
    return data.tobytes().decode()


def load(session: Session) -> str:
    """Return the text of the table that this rank's settings name, or nothing.

    Raises:
        ArgumentError: If a table was asked for by its path and cannot be used for this job.
    """
    config = session.config
    path, asked = None, config.tuning != "auto"
    try:
        path = table_path(config)
        if path is None or not (asked or path.exists()):
            return ""
        text, table = read(path)
        if asked and session.world_size > 1 and table.world(session.place) is None:
            raise ArgumentError(f"it has nothing about {describe(*session.place)}: {_AGAIN}")
    except (ArgumentError, OSError, ValueError, RuntimeError) as error:  # paths that cannot be
        if asked:
            named = str(path or config.tuning)
            raise ArgumentError(f"tuning={named!r} cannot be used: {error}") from None
        warnings.warn(f"{path} is not used: {error}", UserWarning, stacklevel=4)
        return ""
    return text


def table_path(config: Config) -> Path | None:
    """Return the path of the table that the settings name; None for ``off``."""
    if config.tuning == "off":
        return None
    return tuning_path() if config.tuning == "auto" else Path(config.tuning).expanduser()


def read(path: Path) -> tuple[str, Tuning]:
    """Return the text of a table of this machine, and the table.

    Raises:
        ArgumentError: It cannot be read, is no table, or was measured elsewhere.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")  # a device may have no end
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"it cannot be read: {error}") from None
    table = Tuning.parse(text)
    other = table.differences(fingerprint())
    if other:
        raise ArgumentError(f"it was measured with another {other}: {_AGAIN}")
    return text, table


def describe(transport: str, ranks_per_host: tuple[int, ...]) -> str:
    """Return a place in words."""
    return f"{'+'.join(map(str, ranks_per_host))} ranks, {transport}"
