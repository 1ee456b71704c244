"""What is said when CUDA cannot be used."""

from __future__ import annotations

from pycoll.errors import CudaUnavailable


def unavailable(missing: str, fix: str) -> CudaUnavailable:
    """Make the error that names what is missing and what to do.

    Args:
        missing: What is missing, such as ``"there is no CUDA driver"``.
        fix: What to do about it.
    """
    return CudaUnavailable(
        f"{missing}.\nTo use arrays on a CUDA device: {fix}.\n`pycoll doctor` "
        "lists everything that is needed."
    )
