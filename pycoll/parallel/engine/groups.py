"""The groups of ranks that a data-parallel run talks to, each with its own traffic."""

from __future__ import annotations

from pycoll.comm import Communicator
from pycoll.errors import ArgumentError
from pycoll.parallel.analysis.ledger import Channel, Ledger
from pycoll.parallel.mesh import Mesh

AXES = ("replica", "dp", "tp")


def check_axis(axis: str, size: int) -> None:
    """Refuse an axis that means nothing to data parallelism.

    Raises:
        ArgumentError: With the axes that do.
    """
    if axis not in AXES and size > 1:
        raise ArgumentError(
            f"the mesh has axis {axis}={size}; data parallelism knows {', '.join(AXES)}"
        )


class Groups:
    """Channels along the axes of a mesh.

    They are duplicates, so that calls of the layers on the mesh's own communicators wait for none
    of the engine's. Gradients and parameters travel one after the other, in the order in which they
    were started: a gather may write into memory that an earlier reduction works on.

    Attributes:
        shards: The ranks that parameters are sharded over (``dp``).
        replica: The copies of this shard.
        data: All ranks that see different samples (``replica`` and ``dp``).
        tensor: The ranks that share a layer (``tp``).
        world: All ranks.
        ledger: Where their bytes are counted.
    """

    def __init__(self, mesh: Mesh, ledger: Ledger, device: str = "cpu") -> None:
        """Make the channels, whose arrays are on a device; a collective.

        Raises:
            ArgumentError: If the mesh has an axis that means nothing here.
        """
        for axis, size in mesh.axes.items():
            check_axis(axis, size)
        self.mesh, self.ledger, self._device = mesh, ledger, device
        self._owned: list[Communicator] = []
        self.shards = self._duplicate("dp", mesh.group("dp"))
        self.replica = self._duplicate("replica", mesh.group("replica"))
        self.data = self._duplicate("data", mesh.group("replica", "dp"))
        self.tensor = self._duplicate("tp", mesh.group("tp"))
        self.world = self._duplicate("world", mesh.world)

    def _duplicate(self, name: str, comm: Communicator) -> Channel:
        self._owned.append(comm.dup())
        return Channel(self._owned[-1], name, self.ledger, self._device)

    @property
    def place(self) -> str:
        """Which rank this is of which mesh, in words."""
        axes = {axis: size for axis, size in self.mesh.axes.items() if size > 1} or {"dp": 1}
        sizes = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        return f"rank {self.mesh.world.rank} of {sizes}"

    def close(self, error: BaseException | None = None) -> None:
        """Close the channels; with an error, tell the ranks that wait; not a collective."""
        for comm in self._owned:
            comm.__exit__(type(error) if error else None, error, None)
