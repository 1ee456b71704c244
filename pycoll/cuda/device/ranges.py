"""Ranges of NVTX: calls as profilers such as Nsight Systems show them."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_uint64, c_void_p

from pycoll.cuda.device.library import library, unavailable
from pycoll.types import Kind


class Ranges:
    """What begins and ends a range; it needs the device library, and no device.

    Attributes:
        addresses: Of the two functions that an engine calls around a call, as ``Marks`` of
            csrc/engine/trace.h.
    """

    def __init__(self) -> None:
        """Find the functions, and name the kinds of calls.

        Raises:
            CudaUnavailable: If there is no device library, or one that is older.
        """
        path = library().path
        dll = ctypes.CDLL(str(path))
        try:
            self._begin, self._end = dll.pycoll_cuda_range_begin, dll.pycoll_cuda_range_end
            call, name = dll.pycoll_cuda_range_begin_call, dll.pycoll_cuda_range_names
        except AttributeError as error:
            raise unavailable(
                f"{path.name} cannot make ranges: {error}", "build pycoll again"
            ) from None
        for function in (self._begin, self._end, call, name):
            function.restype = None
        self._begin.argtypes = (c_char_p,)
        call.argtypes = c_uint64, c_uint64
        known = {int(kind): kind.name.lower() for kind in Kind}
        names = [known.get(i, "call").encode() for i in range(max(known) + 1)]
        name((c_char_p * len(names))(*names), c_int(len(names)))
        begin, end = (ctypes.cast(f, c_void_p).value or 0 for f in (call, self._end))
        self.addresses: tuple[int, int] = begin, end

    def begin(self, name: str) -> None:
        """Begin a range of this thread."""
        self._begin(name.encode())

    def end(self) -> None:
        """End the newest range of this thread."""
        self._end()
