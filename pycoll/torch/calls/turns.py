"""Calls that are prepared again when their turn comes, because they copy what others write."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pycoll.torch.tensors.layout import Tensors

Job = Callable[[], Any]
Prepare = Callable[[], tuple[Job, Tensors]]
"""Checks the arguments of a call; returns it, and the tensors of its result."""


class Turn(threading.local):
    """The call that a thread prepares again.

    Attributes:
        site: Number of the line of the program that has made it; 0: there is none.
    """

    site: int = 0

    def job(self, prepare: Prepare, site: int) -> Job:
        """Return a job that prepares a call, made at a site, and makes it."""

        def job() -> None:
            self.site = site
            try:
                made, _ = prepare()
            finally:
                self.site = 0
            made()

        return job
