"""What ranks tell each other on behalf of a call: a few numbers each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pycoll.runtime.prepared import Request
from pycoll.types import Kind

if TYPE_CHECKING:
    from pycoll.runtime.session import Session


def exchange(
    session: Session, kind: Kind, row: np.ndarray, timeout: float | None = None
) -> np.ndarray:
    """All-gather a row of numbers as a part of another call, in whose name it is checked.

    Args:
        session: The communicator.
        kind: The call; ranks that make another one, be it an all-gather, get a `MismatchError`.
        row: The numbers of this rank, as many on every rank.
        timeout: See the communicator.

    Returns:
        The numbers of all ranks, ``[world_size, ...]``.
    """
    request = Request(Kind.ALL_GATHER)
    session.refusing(lambda: session.check(request, timeout))
    prepared = session.refusing(lambda: session.prepare(request, row[None], None))
    prepared.spec = replace(prepared.spec, kind=kind, alternative=None)
    prepared.binding = session.bind(prepared.spec)
    return session.start(prepared, timeout, False)
