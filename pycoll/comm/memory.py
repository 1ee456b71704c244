"""Memory that peers read and write without copies: the part of a communicator that hands it out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from pycoll.errors import ArgumentError
from pycoll.runtime.sessions.session import Session

_S = TypeVar("_S", bound=np.generic)
KINDS = ("cpu", "cuda")  # of devices that have symmetric memory


class SymmetricMemory:
    """The methods of `pycoll.Communicator` that make arrays in symmetric memory.

    None of them is a collective: every rank allocates as it likes. A collective works on its
    arrays in place when all ranks pass symmetric memory. To a large call either all ranks pass it
    or none, or it is a `MismatchError` on all; `docs/memory.md` tells the rest.
    """

    _session: Session

    @overload
    def empty(self, shape: int | Sequence[int], *, device: None = None) -> NDArray[np.float32]: ...

    @overload
    def empty(
        self,
        shape: int | Sequence[int],
        dtype: type[_S] | np.dtype[_S],
        *,
        device: None = None,
    ) -> NDArray[_S]: ...

    @overload
    def empty(
        self, shape: int | Sequence[int], dtype: Any = ..., *, device: str | None = None
    ) -> Any: ...

    def empty(
        self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None = None
    ) -> Any:
        """Allocate an array in symmetric memory.

        The memory is reused, or goes back to the system, when the array and its views are
        collected; so the values are arbitrary.

        Args:
            shape: Lengths along each axis, in elements.
            dtype: Element type; any that holds no Python objects.
            device: ``"cuda"`` for a CuPy array in the symmetric heap of this rank's device.

        Raises:
            ArgumentError: If shape, dtype or device cannot be.
            MemoryError: If the machine or the heap has no room for it.
            CudaUnavailable: If there is no such device; the text says what is missing.
        """
        if device is not None and str(device).split(":")[0] not in KINDS:
            raise ArgumentError(f"device={device!r}; accepted: {', '.join(KINDS)}")
        if device not in (None, "cpu"):
            return self._session.device_side().empty(shape, dtype, device)
        return self._session.memory.empty(shape, dtype)

    @overload
    def zeros(self, shape: int | Sequence[int], *, device: None = None) -> NDArray[np.float32]: ...

    @overload
    def zeros(
        self,
        shape: int | Sequence[int],
        dtype: type[_S] | np.dtype[_S],
        *,
        device: None = None,
    ) -> NDArray[_S]: ...

    @overload
    def zeros(
        self, shape: int | Sequence[int], dtype: Any = ..., *, device: str | None = None
    ) -> Any: ...

    def zeros(
        self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None = None
    ) -> Any:
        """Allocate an array of zeros in symmetric memory; otherwise like `empty`."""
        if device in (None, "cpu"):
            return self._session.memory.empty(shape, dtype, zero=True)
        x = self.empty(shape, dtype, device=device)
        x.fill(0)
        return x

    def empty_like(self, x: Any) -> NDArray[Any]:
        """Allocate an array of the shape and dtype of an array; otherwise like `empty`."""
        like = np.asarray(x)
        return self._session.memory.empty(like.shape, like.dtype)

    def symmetric(self) -> AbstractContextManager[None]:
        """Put every NumPy array that is made inside ``with comm.symmetric():`` into the heap.

        It works through NumPy's allocation handler (NEP 49), so arrays that library code makes are
        meant too, of any size; it counts for the current thread or asyncio task. When the heap is
        full, NumPy raises `MemoryError`.
        """
        return self._session.memory.allocating()

    def register(self, x: Any) -> None:
        """Move an array that exists already into symmetric memory, where it lies.

        Its whole pages keep their addresses and contents, so every view and pointer stays valid;
        what is left of it at both ends, under 4 KiB each, is copied with every call. Views of it
        count as symmetric memory too. It costs about one copy of the array.

        No other thread, nor a call in the background, may write to it meanwhile. After a ``fork``
        parent and child share the array. A NumPy array moves back by itself before its memory is
        freed; of any other kind a reference is kept until `unregister`, or until all communicators
        that share the memory are gone.

        Args:
            x: A C-contiguous, writable CPU array of at least a page.

        Raises:
            ArgumentError: If the memory cannot be moved: a file's, shared already, on a stack, too
                small, or registered before.
            MemoryError: If the machine or the heap has no room for it.
        """
        self._session.memory.register(x)

    def unregister(self, x: Any) -> None:
        """Move an array that was registered back into private memory, where it lies.

        Raises:
            ArgumentError: If it is not registered, or a part of what is.
        """
        self._session.memory.unregister(x)
