"""The exceptions of the backend: PyTorch's own types with pycoll's text."""

from __future__ import annotations

import re

from torch.distributed import DistBackendError

from pycoll.errors import ArgumentError, CollError, CollTimeout


class BackendTimeout(DistBackendError, TimeoutError):
    """The deadline passed while a peer had not done its part."""


class BackendArgumentError(DistBackendError, ValueError):
    """An argument was refused; the process group stays usable."""


def as_torch(error: CollError, where: str) -> DistBackendError:
    """Return an error of pycoll as one of PyTorch; `where` names operation, rank and group."""
    text = f"{where}: {type(error).__name__}: {error}"
    if isinstance(error, CollTimeout):
        return BackendTimeout(text)
    if isinstance(error, ArgumentError):
        return BackendArgumentError(text)
    return DistBackendError(text)


_TYPES = {cls.__name__: cls for cls in (BackendTimeout, BackendArgumentError, DistBackendError)}
_TEXT = re.compile(rf"\b({'|'.join(_TYPES)}): (\w+ on rank .*?)(?:\n\nAt:\n|\Z)", re.DOTALL)


def from_text(text: str) -> DistBackendError | None:
    """Return an error of the backend that PyTorch has made a text of; None if it is no such one."""
    found = _TEXT.search(text)
    return _TYPES[found[1]](found[2]) if found else None
