"""A call on device arrays that was launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycoll.cuda.device import arrays

if TYPE_CHECKING:
    from pycoll.cuda.calls.side import DeviceSide
    from pycoll.runtime.calls.prepared import Prepared


class DeviceWork:
    """A call under way on a device; its arrays are kept alive until it has ended."""

    def __init__(self, side: DeviceSide, prepared: Prepared, event: Any) -> None:
        """Hold on to the event behind the launch."""
        self._side, self._prepared, self._event = side, prepared, event

    def done(self) -> bool:
        """Tell whether it has ended, without waiting."""
        return bool(self._event.done)

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> Any:
        """Make a stream wait for it; the host does not wait.

        Args:
            timeout: Not used: no time passes here. See `synchronize`.
            stream: The stream; by default the current one of CuPy.

        Returns:
            What the blocking call would have returned, ready for use on that stream.

        Raises:
            CollError: If a launch of this communicator is known to have failed.
        """
        del timeout
        self._side.check()
        arrays.cupy().cuda.runtime.streamWaitEvent(arrays.stream_of(stream), self._event.ptr)
        return self._prepared.result

    def synchronize(self, timeout: float = 300.0) -> Any:
        """Wait on the host until it has ended.

        Args:
            timeout: Seconds.

        Returns:
            What the blocking call would have returned.

        Raises:
            CollTimeout: If it is not done in time.
            CollError: If it failed; the text says which rank waited for which, and at which step.
        """
        self._side.synchronize(self._event, timeout)
        return self._prepared.result
