"""How far apart the cores of two ranks are; on a virtual machine that changes by the second.

Two ranks exchange bytes through the caches of their cores. When the host moves one of them to
another part of the processor, all contestants are slower, some much more than others; so a number
counts only if the cores were about as near, before and after it, as they have ever been.
"""

import ctypes
import mmap
import os
import subprocess
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "native" / "apart.cpp"
FAR = 4.0  # times the nearest seen: 20 ns within a core, 50 ns within a cache, 280 ns beyond it
WORDS_BYTES = 4096
LOOKS, PAUSE_S = 300, 0.01


def build(folder):
    """Compile the probe and make the memory of its two ranks; return the paths of both."""
    library, words = Path(folder) / "apart.so", Path(folder) / "apart.words"
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(SOURCE), "-o", str(library)], check=True)
    words.write_bytes(bytes(WORDS_BYTES))
    return library, words


def nearest(library, words):
    """Return the shortest distance that two processes find within some seconds, in ns."""
    child = os.fork()
    apart, found = Apart(library, words, int(child == 0)), []
    for _ in range(LOOKS):
        found.append(apart.ns())
        time.sleep(PAUSE_S)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return min(found)


class Apart:
    """The distance between ranks 0 and 1 of two, seen from one of them."""

    def __init__(self, library, words, rank):
        """Join; ``library`` and ``words`` are what `build` has made."""
        self._measure = ctypes.CDLL(str(library)).apart_ns
        self._measure.restype = ctypes.c_double
        with open(words, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), WORDS_BYTES)
        self._place, self._rank = ctypes.c_char.from_buffer(self._map), rank

    def ns(self):
        """Return nanoseconds of a barrier of the two, who both call this now."""
        return self._measure(ctypes.byref(self._place), self._rank)
