"""Collectives you can read, prove and trust, at the speed of the hardware.

The names below are the interface; see `Communicator` for the collectives. Public, too, are
`pycoll.parallel`, `pycoll.torch`, `pycoll.testing` and, to write algorithms, `pycoll.schedule.ir`.
Until 1.0 a minor version may change them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pycoll.config import VERSION, Config
from pycoll.errors import (
    ArgumentError,
    CollError,
    CollTimeout,
    CommClosed,
    ConcurrentUseError,
    CudaUnavailable,
    ForkedError,
    MismatchError,
    PeerLeft,
    PeerLost,
    PeerRejected,
    Revoked,
    ScheduleError,
    TransportError,
)

_OWN = ("TYPE_CHECKING", "annotations", "importlib", "_failure", "_error", "_OWN")
_failure: ImportError | None = None
try:
    importlib.import_module("pycoll._C")  # alone, so that the reason of a failure is its own
    from pycoll.comm import ANY, Communicator, Grid, MessageInfo, Window, Work, wait_all, wait_any
    from pycoll.start import from_mpi, init, virtual_ranks
except ImportError as _error:  # the engine is missing or broken; `pycoll doctor` has to work
    _failure = _error

if not TYPE_CHECKING:  # to a type checker a name that is missing is an error

    def __getattr__(name: str) -> object:
        """Say what is wrong where something that needs the engine, or does not exist, is used."""
        if _failure is not None and name in (*__all__, "_C"):
            raise ImportError(
                f"pycoll cannot be used: {_failure}; `python -m pycoll doctor` tells what to do"
            ) from _failure
        text = f"module 'pycoll' has no attribute {name!r}"
        if _failure is None and not name.startswith("__"):
            names = importlib.import_module("pycoll.comm.other_names")
            text += names.of_module(name, Communicator)
        raise AttributeError(text)

    def __dir__() -> list[str]:
        """Leave out what this file imports for itself, so that completion shows the interface."""
        return [name for name in globals() if name not in _OWN]


__version__ = VERSION


def load_ipython_extension(shell: object) -> None:
    """Add ``%%ranks`` to IPython or Jupyter: what ``%load_ext pycoll`` calls."""
    importlib.import_module("pycoll.cli.notebook.magic").load(shell)  # it needs all that is here


__all__ = [
    "ANY",
    "ArgumentError",
    "CollError",
    "CollTimeout",
    "CommClosed",
    "Communicator",
    "ConcurrentUseError",
    "Config",
    "CudaUnavailable",
    "ForkedError",
    "Grid",
    "MessageInfo",
    "MismatchError",
    "PeerLeft",
    "PeerLost",
    "PeerRejected",
    "Revoked",
    "ScheduleError",
    "TransportError",
    "Window",
    "Work",
    "from_mpi",
    "init",
    "virtual_ranks",
    "wait_all",
    "wait_any",
]
