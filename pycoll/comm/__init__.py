"""The communicator: where what moves meets how it runs.

`communicator` has the collectives, and the other files are parts of it.
Uses the runtime, and `pycoll.cuda` when an array lies on a device. Read `communicator` first.
"""

from pycoll.comm.communicator import Communicator
from pycoll.comm.grid import Grid
from pycoll.comm.messages import ANY
from pycoll.comm.windows import Window
from pycoll.runtime.calls.messages import MessageInfo, wait_all, wait_any
from pycoll.runtime.calls.work import Work

__all__ = ["ANY", "Communicator", "Grid", "MessageInfo", "Window", "Work", "wait_all", "wait_any"]
