"""The exceptions of pycoll, one hierarchy.

A message says what failed, who (rank, peer), where (collective, algorithm, step), what was expected
and what was found, and what to do next.
"""


class CollError(Exception):
    """Base class of every error raised by pycoll."""


class ArgumentError(CollError, ValueError):
    """An argument was refused; nothing was sent to peers and the communicator stays usable."""


class ScheduleError(CollError):
    """An algorithm or a compiled plan is wrong; raised before anything runs."""


class MismatchError(CollError):
    """Ranks called different collectives, or the same one with different arguments."""


class PeerRejected(CollError):
    """Another rank refused its arguments for this call; the communicator stays usable."""


class TransportError(CollError):
    """The communicator can no longer move data."""


class PeerLost(TransportError):
    """A peer process died."""


class PeerLeft(PeerLost):
    """A peer left by an exception, by exiting, or by closing its communicator."""


class CollTimeout(TransportError, TimeoutError):
    """The deadline passed while a peer had not done its part.

    Attributes:
        missing: Ranks that had not made the call, as far as that is known.
    """

    missing: tuple[int, ...] = ()


class Revoked(TransportError):
    """The communicator was aborted, by a call of ``abort`` or by an interrupt on some rank."""


class CommClosed(CollError):
    """The communicator was used after it was closed."""


class ForkedError(CollError):
    """The communicator was used in a child process made by fork."""


class ConcurrentUseError(CollError):
    """Two threads used one communicator at the same time."""


class CudaUnavailable(CollError, RuntimeError):
    """CUDA cannot be used here; the text says what is missing and what to do."""


def sendable(text: str) -> str:
    """Return a text as it can be sent: with escapes for what is no UTF-8, as in names of files."""
    return text.encode(errors="backslashreplace").decode()


def cut(text: str, most_bytes: int) -> str:
    """Return a text that has room in so many bytes; one that is too long ends in " [...]"."""
    data = sendable(text).encode()
    if len(data) <= most_bytes:
        return data.decode()
    return data[: most_bytes - 6].decode(errors="ignore") + " [...]"


def kind_of(x: object) -> str:
    """Return the type of an object in words: "an int"."""
    name = type(x).__name__
    vowel = name[0] in "aeiouAEIOU" or name.startswith("nd")  # an ndarray, as it is spoken
    return f"{'an' if vowel else 'a'} {name}"


def in_words(error: BaseException) -> str:
    """Return type and message of an exception, for other ranks; never fails itself."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as worse:  # a class of the user's
        text = f"(no text, for its __str__ raised {type(worse).__name__})"
    return sendable(f"{name}: {text}" if text else name)
