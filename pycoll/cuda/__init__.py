"""Arrays on CUDA devices: kernels over peer memory, NCCL, virtual ranks; see docs/cuda.md.

Nothing of CUDA is loaded before it is needed. `pycoll.init` and `pycoll.virtual_ranks` are the ways
in; `missing` tells what a machine lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycoll.cuda.device.probe import missing

if TYPE_CHECKING:
    from pycoll.runtime.sessions.session import Session


def open_device(session: Session) -> Any:
    """Make a rank's side of calls on device arrays; see `pycoll.cuda.transports.open.open_side`."""
    from pycoll.cuda.transports.open import open_side  # only now, as most programs never need it

    return open_side(session)


__all__ = ["missing", "open_device"]
