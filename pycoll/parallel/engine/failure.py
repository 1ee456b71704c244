"""What a rank does with an error of its own within a step: no other rank waits for it."""

from __future__ import annotations

from typing import Any

from pycoll.errors import TransportError
from pycoll.parallel.channels import Groups

_LAYER_AXES = ("tp", "cp")  # along which layers make calls of their own


class Failure:
    """Holds the first error that a layer of this rank raises in a step, or what makes a sample.

    From then on this rank runs no layer, but it takes part in all that the others call, with zeros.
    When ranks agree on the step all hear of it, and none takes it::

        with failure:
            y, saved = layer.forward(params, x)

    Where layers make calls of their own, other ranks may wait inside the layer that has failed: the
    error is raised at once, and ends the engine on all ranks. Errors of a transport are not held,
    either, and none of a rank that is alone, whose hook may have peers of its own.

    Attributes:
        error: The error.
        holds: Whether errors are held; False: they are raised where they happen.
    """

    def __init__(self, groups: Groups | None = None) -> None:
        """Hold errors for the other ranks of groups; without groups hold none."""
        self.error: Exception | None = None
        self._groups = groups
        axes = {} if groups is None else groups.axes
        self._shared = any(axes.get(axis, 1) > 1 for axis in _LAYER_AXES)
        self.holds: bool = groups is not None and not self._shared

    @property
    def alone(self) -> bool:
        """Whether no other rank takes the step."""
        return self._groups is None or self._groups.world.world_size == 1

    def __enter__(self) -> Failure:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is not None and self._shared:
            self.end(error)
        if not isinstance(error, Exception) or isinstance(error, TransportError):
            return False
        if not self.holds or self.alone:
            return False
        self.error = error
        return True

    def end(self, error: BaseException) -> None:
        """End the engine on all ranks, also on those that wait inside of a layer."""
        assert self._groups is not None
        self._groups.close(error)
        mesh = self._groups.mesh
        for axis in mesh.axes.keys() & _LAYER_AXES:
            mesh.group(axis).__exit__(type(error), error, None)

    def take(self) -> Exception | None:
        """Return the error, and hold it no longer."""
        error, self.error = self.error, None
        return error
