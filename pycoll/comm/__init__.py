"""The communicator: where what moves meets how it runs.

`communicator` has the collectives; `memory` and `v_variants` are its other parts.
Uses the runtime, and `pycoll.cuda` when an array lies on a device. Read `communicator` first.
"""

from pycoll.comm.communicator import ANY, Communicator
from pycoll.runtime.calls.work import Work

__all__ = ["ANY", "Communicator", "Work"]
