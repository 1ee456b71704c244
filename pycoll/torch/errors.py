"""The exceptions of the backend: PyTorch's own types with pycoll's text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed import DistBackendError

from pycoll.errors import ArgumentError, CollError, CollTimeout

_MOST_SHOWN = 16  # ranks


class BackendTimeout(DistBackendError, TimeoutError):
    """The deadline passed while a peer had not done its part."""


class BackendArgumentError(DistBackendError, ValueError):
    """An argument was refused; the process group stays usable."""


def as_torch(error: CollError, where: str) -> DistBackendError:
    """Return an error of pycoll as one of PyTorch; `where` names operation, rank and group."""
    text = f"{where}: {type(error).__name__}: {error}"
    if isinstance(error, CollTimeout):  # in the words of gloo, which programs may look for
        return BackendTimeout(f"{where}: Timed out ({type(error).__name__}): {error}")
    if isinstance(error, ArgumentError):
        return BackendArgumentError(text)
    return DistBackendError(text)


def of_job(ranks: Sequence[int] | None) -> str:
    """Say which ranks of the job those of a group are; nothing if they have the same numbers."""
    if not ranks or list(ranks) == list(range(len(ranks))):
        return ""
    shown = [str(rank) for rank in ranks[:_MOST_SHOWN]]
    more = ["..."] if len(ranks) > _MOST_SHOWN else []
    return f" (its ranks are {', '.join(shown + more)} of the job)"


def in_words_of_gloo(
    error: BackendTimeout, rank: int, limit_s: float, all_ranks: bool
) -> BackendTimeout:
    """Return an error of ``monitored_barrier`` as gloo says it, with the text of this one."""
    missing = getattr(error.__cause__, "missing", ())
    if rank:
        text = (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            "for send/recv from rank 0. Please check rank 0 logs for faulty rank."
        )
    elif limit_s <= 0 or not missing:
        text = f"Rank 0 timed out in monitoredBarrier after {limit_s * 1000:.0f} ms."
    else:
        who = f"Ranks {', '.join(map(str, missing))}" if all_ranks else f"Rank {missing[0]}"
        text = f"[Rank 0]: {who} failed to pass monitoredBarrier in {limit_s * 1000:.0f} ms"
    return BackendTimeout(f"{text}\n Original exception: \n{error}")


_TYPES = {cls.__name__: cls for cls in (BackendTimeout, BackendArgumentError, DistBackendError)}
_TEXT = re.compile(rf"\b({'|'.join(_TYPES)}): (\w+ on rank .*?)(?:\n\nAt:\n|\Z)", re.DOTALL)


def from_text(text: str) -> DistBackendError | None:
    """Return an error of the backend that PyTorch has made a text of; None if it is no such one."""
    found = _TEXT.search(text)
    return _TYPES[found[1]](found[2]) if found else None
