"""A file for what memory shall not hold: blocks of it, and the thread that moves them.

The file has no name, so nothing is left of it when the process ends, however it does. Room is
reserved before it is used: a full disk is an error there, and nowhere later.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE


class Storage:
    """A file and a thread that reads and writes it, one call after the other.

    Attributes:
        file: Its descriptor.
        paged: What is used is brought into memory before, and let go after.
    """

    paged = True

    def __init__(self, directory: str | None) -> None:
        """Make the file.

        Args:
            directory: Where; None: the directory for temporary files.

        Raises:
            OSError: If that is not possible.
        """
        with tempfile.TemporaryFile(dir=directory) as file:
            self.file: int = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.file).atexit = False
        self._thread = ThreadPoolExecutor(1, "pycoll-storage")
        self._lock = threading.RLock()  # a block may be released while another one is reserved
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._end = 0

    def reserve(self, nbytes: int) -> int:
        """Return where so many bytes can be stored, rounded up to pages.

        Raises:
            OSError: If the disk is full.
        """
        with self._lock:
            free = self._free[pages(nbytes)]
            return free.pop() if free else self._extend(pages(nbytes))

    def _extend(self, nbytes: int) -> int:
        os.posix_fallocate(self.file, self._end, nbytes)
        self._end += nbytes
        return self._end - nbytes

    def release(self, start: int, nbytes: int) -> None:
        """Let the bytes be used again."""
        with self._lock:
            self._free[pages(nbytes)].append(start)

    def owns(self, x: Any) -> bool:
        """Tell whether it can keep an array: one of NumPy, of numbers."""
        return type(x) is np.ndarray and not x.dtype.hasobject

    def address(self, x: Any) -> int:
        """Return the address of an array."""
        return x.ctypes.data

    def empty(self, nbytes: int) -> Any:
        """Return bytes in memory."""
        return np.empty(nbytes, np.uint8)

    def view(self, memory: Any, offset: int, like: Any) -> Any:
        """Return an array in such bytes, with shape, strides and type of another one."""
        return np.ndarray(like.shape, like.dtype, memory, offset, like.strides)

    def write(self, data: np.ndarray, start: int) -> None:
        """Write all of some bytes."""
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self.file, rest, start)
            rest, start = rest[count:], start + count

    def read(self, into: np.ndarray, start: int) -> None:
        """Read until an array of bytes is full."""
        rest = memoryview(into)
        while rest:
            count = os.preadv(self.file, [rest], start)
            if count == 0:
                raise OSError(f"the file ends at {start}, with {len(rest)} bytes to read")
            rest, start = rest[count:], start + count

    def later(self, function: Any, *args: Any) -> Future[Any]:
        """Call a function in the thread, after what it was given before."""
        return self._thread.submit(function, *args)

    def vector(self, count: int, dtype: Any) -> Mapped:
        """Return a vector of zeros in the file.

        Raises:
            OSError: If the disk is full.
        """
        nbytes = max(1, count * np.dtype(dtype).itemsize)
        with self._lock:
            start = self._extend(pages(nbytes))  # where nothing else has been
        return Mapped(self, start, nbytes, count, dtype)

    def close(self) -> None:
        """End the thread once it has done what it was given."""
        self._thread.shutdown()


def pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to pages."""
    return -(-nbytes // PAGE) * PAGE


class Mapped:
    """A vector in the file; the parts of it that are used are in memory until they are evicted.

    Attributes:
        array: The vector.
    """

    def __init__(self, storage: Storage, start: int, nbytes: int, count: int, dtype: Any) -> None:
        self._map = mmap.mmap(storage.file, pages(nbytes), offset=start)
        self._storage, self._start = storage, start
        self.array: np.ndarray = np.frombuffer(self._map, dtype, count)

    def touch(self, lo: int, hi: int) -> None:
        """Bring elements ``[lo, hi)`` into memory."""
        self.array[lo:hi].view(np.uint8)[::PAGE].max(initial=0)

    def evict(self, lo: int, hi: int) -> None:
        """Let the kernel write elements ``[lo, hi)``, from the start of a page, and forget them."""
        first, last = lo * self.array.itemsize, pages(hi * self.array.itemsize)
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
            place = self._start + first, last - first
            os.posix_fadvise(self._storage.file, *place, os.POSIX_FADV_DONTNEED)
