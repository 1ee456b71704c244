"""A mesh: the ranks of a communicator, arranged along named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pycoll.comm import Communicator
from pycoll.errors import ArgumentError, MismatchError


class Mesh:
    """Ranks on a grid, with a communicator along each axis.

    ``Mesh(comm, dp=2, tp=2)`` arranges four ranks in two rows; the last axis varies fastest, so
    neighbouring ranks share a ``tp`` group: put the axis that communicates most last. ``mesh.dp``
    is the communicator of the ranks that differ from this one only along ``dp``.

    Axes that the engines know: ``dp`` (data parallel, and where ZeRO scatters), ``replica`` (copies
    of the sharded ``dp`` groups, as in MiCS and HSDP), ``cp`` (context parallel), ``pp`` (stages of
    a `Pipeline`), ``tp`` (tensor parallel). An axis that is not given has size 1.
    """

    def __init__(self, comm: Communicator, **axes: int) -> None:
        """Arrange all ranks of `comm`; a collective.

        Args:
            comm: The ranks; stays the caller's.
            axes: Size of each axis, outermost first. One may be -1: whatever is left. Without any,
                all ranks are along ``dp``.

        Raises:
            ArgumentError: If the sizes do not multiply to the world size.
            MismatchError: On every rank, if they have different axes.
        """
        self.world: Communicator = comm
        self.axes: dict[str, int] = _agreed(comm, axes)
        self._groups: dict[tuple[str, ...], Communicator] = {}
        for name in self.axes:
            self._groups[(name,)] = self._split((name,))

    def _split(self, names: tuple[str, ...]) -> Communicator:
        here = self.coordinates
        color = key = 0
        for axis, size in self.axes.items():
            if axis in names:
                key = key * size + here[axis]
            else:
                color = color * size + here[axis]
        return self.world.split(color, key)  # type: ignore[return-value]

    @property
    def coordinates(self) -> dict[str, int]:
        """Index of this rank along each axis."""
        found, rest = {}, self.world.rank
        for axis in reversed(self.axes):
            rest, found[axis] = divmod(rest, self.axes[axis])
        return {axis: found[axis] for axis in self.axes}

    def size(self, axis: str) -> int:
        """Size of ``axis``; 1 if the mesh has no such axis."""
        return self.axes.get(axis, 1)

    def coordinate(self, axis: str) -> int:
        """Index of this rank along ``axis``; 0 if the mesh has no such axis."""
        return self.coordinates.get(axis, 0)

    def group(self, *names: str) -> Communicator:
        """Return the communicator of the ranks that differ along the axes ``names`` only.

        A collective the first time it is called for these axes. Axes that the mesh does not have
        count as axes of size 1.
        """
        known = tuple(axis for axis in self.axes if axis in names)
        if known not in self._groups:
            self._groups[known] = self._split(known)
        return self._groups[known]

    def members(self, *names: str) -> list[int]:
        """Return the ranks of the mesh that differ along the axes ``names`` only, as in `group`."""
        numbers = np.arange(self.world.world_size).reshape(tuple(self.axes.values()))
        here = self.coordinates
        found = numbers[tuple(slice(None) if a in names else here[a] for a in self.axes)]
        return [int(rank) for rank in np.ravel(found)]

    def __getattr__(self, name: str) -> Communicator:
        groups = self.__dict__.get("_groups", {})
        if (name,) in groups:
            group: Communicator = groups[(name,)]
            return group
        axes = ", ".join(self.__dict__.get("axes", {}))
        raise AttributeError(f"this mesh has no axis {name!r}; it has {axes or 'none'}")

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return f"<pycoll.parallel.Mesh {axes}, rank {self.world.rank}>"

    def close(self) -> None:
        """Close the communicators that the mesh has made."""
        for comm in self._groups.values():
            comm.close()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for comm in self._groups.values():
            comm.__exit__(kind, error, trace)


def _agreed(comm: Communicator, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the axes, compared with those of all ranks; a collective."""
    sizes, refused = {}, None
    try:
        sizes = _sizes(comm.world_size, axes)
        text = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    except ArgumentError as error:  # the others wait for this rank
        refused, text = error, f"none: {' '.join(str(error).split())}"
    lines = bytes(comm.all_gather_v(np.frombuffer(f"{text}\n".encode(), np.uint8))).decode()
    if refused is not None:
        raise refused
    seen = lines.rstrip("\n").split("\n")
    if len(set(seen)) > 1:
        each = "; ".join(f"rank {rank} has {other}" for rank, other in enumerate(seen))
        raise MismatchError(f"ranks make different meshes: {each}; give all of them the same axes")
    return sizes


def _sizes(world_size: int, axes: Mapping[str, int]) -> dict[str, int]:
    sizes = dict(axes) or {"dp": world_size}
    for axis, size in sizes.items():
        if hasattr(Mesh, axis) or axis in ("world", "axes"):
            raise ArgumentError(f"an axis cannot be named {axis!r}: a mesh has that attribute")
        if not isinstance(size, int) or (size < 1 and size != -1):
            raise ArgumentError(f"axis {axis}={size!r}; accepted are integers >= 1, and -1 once")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ArgumentError(f"axes {', '.join(open_axes)} are all -1; only one can be what is left")
    known = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and world_size % known == 0:
        sizes[open_axes[0]] = world_size // known
    if open_axes and world_size % known:
        others = " x ".join(f"{axis}={size}" for axis, size in axes.items() if size != -1)
        raise ArgumentError(
            f"{open_axes[0]} = ranks / ({others}) = {world_size} / {known} is not whole: a mesh of "
            f"these axes does not hold {world_size} ranks"
        )
    if math.prod(sizes.values()) != world_size:
        text = " x ".join(f"{axis}={size}" for axis, size in axes.items())
        raise ArgumentError(
            f"a mesh of {text} does not hold {world_size} ranks; sizes must "
            f"multiply to {world_size}"
        )
    return sizes
