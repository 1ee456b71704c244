"""The exceptions of the backend: PyTorch's own types with pycoll's text."""

from __future__ import annotations

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
