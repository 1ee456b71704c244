"""Arrays on CUDA devices: kernels over peer memory, NCCL, virtual ranks; see docs/cuda.md.

Nothing of CUDA is loaded before it is needed. `pycoll.init` and `pycoll.virtual_ranks` make what
uses it; `missing` tells what a machine lacks. Each folder uses those named before it: `device`,
`transports`, `calls`. Read `calls.side` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycoll.runtime.sessions.session import Session


def open_device(session: Session) -> Any:
    """Make a rank's side of calls on device arrays; see `pycoll.cuda.calls.side.open_side`."""
    from pycoll.cuda.calls.side import open_side  # only now, as most programs never need it

    return open_side(session)


def call_marks() -> tuple[int, int]:
    """Return the addresses of what makes ranges of NVTX around calls; see `Ranges`."""
    from pycoll.cuda.device.ranges import Ranges  # likewise

    return Ranges().addresses


def missing() -> list[str]:
    """Return what is missing for arrays on CUDA devices, one line each; empty if they work."""
    from pycoll.cuda.probe import parts  # likewise

    return [f"{part.name}: {part.found} {part.fix}" for part in parts() if part.fix]


__all__ = ["call_marks", "missing", "open_device"]
