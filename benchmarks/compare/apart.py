"""How far apart the cores of two ranks are; on a virtual machine that changes by the second.

Two ranks exchange bytes through the caches of their cores. When the host moves one of them, the two
may become halves of one core (a barrier takes 25 ns on the machine that this was written on), be in
another part of the processor (260 ns), or be two cores with a cache in common again (60 ns). All
contestants feel that, but not alike; so a number counts if the distance was the usual one, before
and after.
"""

import ctypes
import mmap
import os
import signal
import subprocess
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "native" / "apart.cpp"
UNLIKE = 1.6  # times as far, or as near, as usual
WORDS_BYTES = 4096
LOOKS, PAUSE_S = 600, 0.02
PATIENCE_S = 20  # of one wait


def build(folder):
    """Compile the probe and make the memory of its two ranks; return the paths of both."""
    library, words = Path(folder) / "apart.so", Path(folder) / "apart.words"
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(SOURCE), "-o", str(library)], check=True)
    words.write_bytes(bytes(WORDS_BYTES))
    return library, words


def reset(words):
    """Begin anew: two ranks that were stopped may not have come equally far."""
    with open(words, "r+b") as file:
        file.write(bytes(WORDS_BYTES))


def look(library, words, looks=LOOKS):
    """Return the distances that two processes find within some seconds, in ns."""
    reset(words)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    try:
        apart, found = Apart(library, words, int(child == 0)), []
        for _ in range(looks):
            found.append(apart.ns())
            time.sleep(PAUSE_S)
    finally:
        if child == 0:
            os._exit(0)
        os.kill(child, signal.SIGKILL)  # it has done as much
        os.waitpid(child, 0)
    return found


def wait(library, words, usual_ns, patience_s):
    """Wait until two cores are as far apart as usual, but not for ever; return seconds."""
    begin = time.monotonic()
    while (spent := time.monotonic() - begin) < min(patience_s, PATIENCE_S):
        if all(is_usual(ns, usual_ns) for ns in look(library, words, 5)):
            break
    return spent


def is_usual(ns, usual_ns):
    """Whether two cores are about as far apart as usual; True where nothing was measured (0)."""
    return usual_ns / UNLIKE <= ns <= usual_ns * UNLIKE or ns == 0


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
