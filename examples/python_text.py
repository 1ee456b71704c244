"""The source of Python's own library as a text to learn, and how well counting predicts it."""

import sysconfig
from pathlib import Path

import numpy as np

import pycoll

HELD_OUT = 16  # every so many files, one is kept for the test
UNSUITED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def library_files() -> list[Path]:
    """Return the files of the library in a fixed order, without packages that were installed."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    return [root / path for path in sorted(files) if not UNSUITED & set(path.parts)]


def read(limit: int | None = None) -> tuple[np.ndarray, ...]:
    """Read the text.

    Args:
        limit: Bytes of each part that are wanted; None: all.

    Returns:
        Bytes to train on and bytes held out, as uint8.
    """
    files = library_files()
    held_out = files[::HELD_OUT]
    del files[::HELD_OUT]
    return _start(files, limit), _start(held_out, limit)


def _start(files: list[Path], limit: int | None) -> np.ndarray:
    """Return the first bytes of the contents of files."""
    text = bytearray()
    for path in files:
        if limit is not None and len(text) >= limit:
            break
        text += path.read_bytes()
    return np.frombuffer(text, np.uint8)[:limit]


def load(comm: pycoll.Communicator, limit: int | None = None) -> tuple[np.ndarray, ...]:
    """Read the text on rank 0 and hand it to all.

    Args:
        comm: All ranks.
        limit: As for `read`, which says what is returned.
    """
    parts = read(limit) if comm.rank == 0 else (np.zeros(0, np.uint8),) * 2
    sizes = comm.broadcast(np.array([len(part) for part in parts]))
    if comm.rank > 0:
        parts = tuple(np.empty(size, np.uint8) for size in sizes)
    return tuple(comm.broadcast(part) for part in parts)


def grams(text: np.ndarray, order: int) -> np.ndarray:
    """Return the last `order` bytes at each position of a text as one number; `order` <= 8."""
    numbers = np.zeros(len(text) - order + 1, np.uint64)
    for i in range(order):
        numbers = numbers << np.uint64(8) | text[i : len(text) - order + 1 + i]
    return numbers


def lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key, 0 for those that there are not; keys are sorted."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def ngram_losses(train: np.ndarray, test: np.ndarray, order: int) -> np.ndarray:
    """Return the loss at each byte of `test` but the first ``order - 1``, in nats.

    A byte is predicted from the ``order - 1`` before it. Counts of longer contexts are mixed with
    those of shorter ones as Witten and Bell do (IEEE Trans. Information Theory 37(4), 1991, method
    C): a context seen n times with d different bytes gives ``(count + d * shorter) / (n + d)``.
    """
    p = np.full(len(test), 1 / 256)
    for n in range(1, order + 1):
        known, counts = np.unique(grams(train, n), return_counts=True)
        contexts, first = np.unique(known >> np.uint64(8), return_index=True)
        different = np.diff(first, append=len(known))
        total = np.add.reduceat(counts, first)
        wanted = grams(test, n)
        seen, kinds = (lookup(contexts, v, wanted >> np.uint64(8)) for v in (total, different))
        mixed = lookup(known, counts, wanted) + kinds * p[n - 1 :]
        p[n - 1 :] = np.where(seen > 0, mixed / np.maximum(seen + kinds, 1), p[n - 1 :])
    losses: np.ndarray = -np.log(p[order - 1 :])
    return losses
