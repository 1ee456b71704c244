"""When replicas take steps of their own, and when they average."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Groups
from pycoll.parallel.engine.options import Options
from pycoll.parallel.state.bucket import Bucket


class Periods:
    """The steps between two averages, with `Options.sync_every`; without, nothing happens.

    Attributes:
        near: Groups of the ranks that reduce gradients: those of one replica, but all before step
            `Options.sync_after`.
    """

    def __init__(self, options: Options, groups: Groups) -> None:
        """Make the groups; a collective."""
        self._options, self._groups = options, groups
        self.near: Groups = groups
        if options.sync_every:
            if "replica" not in groups.axes:
                raise ArgumentError(
                    f"sync_every={options.sync_every} averages along replica, which {groups.mesh} "
                    "lacks; make the mesh with it, such as Mesh(comm, replica=-1)"
                )
            self._own, self.near = groups.of_replica(), copy.copy(groups)
        self.restart(0)

    def restart(self, steps: int) -> None:
        """Begin a period after so many steps: replicas are together."""
        self._calls, self._apart = 0, False
        if self._options.sync_every:
            self.near.use(self._own if steps >= self._options.sync_after else self._groups)

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Make what averaging keeps for ``buckets``."""
        for bucket in buckets if self._options.sync_every else ():
            self._options.averaging.prepare(bucket)

    def begin(self, buckets: Sequence[Bucket], steps: int) -> None:
        """Note where replicas begin, after so many steps, if a period begins."""
        every = self._options.sync_every
        if every and steps >= self._options.sync_after and self._calls % every == 0:
            for bucket in buckets:
                self._options.averaging.begin(bucket)

    def end(self, buckets: Sequence[Bucket], steps: int) -> None:
        """Average after the ``steps``-th step, if it is time."""
        if not (every := self._options.sync_every):
            return
        if steps <= self._options.sync_after:
            self.restart(steps)
            return
        self._calls, self._apart = self._calls + 1, True
        if self._calls % every == 0:
            self._meet(self._options.averaging.apply, buckets, steps)
            self._apart = not self._options.averaging.meets

    def average(self, buckets: Sequence[Bucket], steps: int) -> None:
        """Bring replicas together now, if they are not; a collective."""
        if not self._options.sync_every:
            raise ArgumentError("average is for sync_every; without it replicas are together")
        if self._apart:
            self._meet(self._options.averaging.together, buckets, steps)
        self.restart(steps)

    def _meet(self, average: Callable[..., None], buckets: Sequence[Bucket], steps: int) -> None:
        options = self._options
        number = (steps - options.sync_after) // (options.sync_every or 1)
        average(buckets, self._groups.replica, options.order, max(1, number))
        for bucket in buckets:
            bucket.publish()

    def check_together(self) -> None:
        """Refuse to save or gather parameters that differ between replicas."""
        if self._apart:
            raise ArgumentError(
                f"replicas have different parameters after {self._calls} steps; call average() "
                "to bring them together"
            )
