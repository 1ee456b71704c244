"""Taking a place among the ranks of one host: control memory, heap, and what ranks agree on."""

from __future__ import annotations

from pycoll import _C
from pycoll.config import Config, Launch
from pycoll.errors import CollError, in_words
from pycoll.runtime.arrays.symmetric_memory import Memory
from pycoll.runtime.selection.measured_choices import agree
from pycoll.runtime.sessions.reports import raising
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.startup.make_groups import decline, open_control


def take_place(launch: Launch, config: Config) -> Session:
    """Join the ranks whose memory is that of `launch`, which stays the caller's; a collective."""
    n = launch.world_size
    try:
        control = open_control(launch.control_fd, n, config)
    except CollError as error:
        decline(launch, error)
        raise
    try:
        heap = raising(_C.Heap, launch.heap_fd, n, config.heap_bytes)
    except CollError as error:  # nobody else knows that this rank will not come
        raising(control.decline, launch.rank, in_words(error))
        raise
    return agree(Session(control, Memory(heap, launch.rank), launch.rank, n, config))
