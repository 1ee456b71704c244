"""Random numbers that depend on the index of an element in the global array, and on nothing else.

Element i of the array named by a key is word i of that key's sequence. Any rank can make any part
of an array alone: weights and dropout masks are the same on every mesh, bit for bit.

Words come from Philox4x64-10, a counter-based generator (Salmon, Moraes, Dror and Shaw, "Parallel
random numbers: as easy as 1, 2, 3", SC 2011, section 4.2), in NumPy's implementation. What is made
of them uses only operations that IEEE 754 rounds correctly, so machines agree as well.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError

Part = Sequence[slice]
"""One slice with step 1 for each leading axis of a global array; axes left out are whole."""

_WORDS_PER_BLOCK = 4

# Wichura, "Algorithm AS 241: The percentage points of the normal distribution", Applied Statistics
# 37(3), 1988, PPND16: numerators and denominators for the middle, the tails and the far tails.
_MIDDLE = (
    "3.3871328727963666080e0 1.3314166789178437745e2 1.9715909503065514427e3 "
    "1.3731693765509461125e4 4.5921953931549871457e4 6.7265770927008700853e4 "
    "3.3430575583588128105e4 2.5090809287301226727e3",
    "1.0 4.2313330701600911252e1 6.8718700749205790830e2 5.3941960214247511077e3 "
    "2.1213794301586595867e4 3.9307895800092710610e4 2.8729085735721942674e4 "
    "5.2264952788528545610e3",
)
_TAIL = (
    "1.42343711074968357734e0 4.63033784615654529590e0 5.76949722146069140550e0 "
    "3.64784832476320460504e0 1.27045825245236838258e0 2.41780725177450611770e-1 "
    "2.27238449892691845833e-2 7.74545014278341407640e-4",
    "1.0 2.05319162663775882187e0 1.67638483018380384940e0 6.89767334985100004550e-1 "
    "1.48103976427480074590e-1 1.51986665636164571966e-2 5.47593808499534494600e-4 "
    "1.05075007164441684324e-9",
)
_FAR = (
    "6.65790464350110377720e0 5.46378491116411436990e0 1.78482653991729133580e0 "
    "2.96560571828504891230e-1 2.65321895265761230930e-2 1.24266094738807843860e-3 "
    "2.71155556874348757815e-5 2.01033439929228813265e-7",
    "1.0 5.99832206555887937690e-1 1.36929880922735805310e-1 1.48753612908506148525e-2 "
    "7.86869131145613259100e-4 1.84631831751005468180e-5 1.42151175831644588870e-7 "
    "2.04426310338993978564e-15",
)


@dataclass(frozen=True)
class Key:
    """The name of one infinite sequence of random words.

    Attributes:
        seed: Any integer.
        path: Names within the seed; equal seeds and paths give equal words.
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def fold(self, *names: str | int) -> Key:
        """Return the key of a part of what this key names."""
        return Key(self.seed, self.path + names)

    @property
    def name(self) -> str:
        """The path with dots, as parameters are named."""
        return ".".join(map(str, self.path))

    def number(self) -> int:
        """Return the 128 bits with which Philox starts."""
        text = repr((int(self.seed), [str(name) for name in self.path]))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


@dataclass
class Cursor:
    """Position of training, for layers that draw new numbers in every step.

    Set it before each micro-batch, for instance in the generator that yields micro-batches.

    Attributes:
        step: Number of the training step.
        sample: Number of the first sample of the micro-batch within the global batch of this step.
        training: False turns dropout off.
    """

    step: int = 0
    sample: int = 0
    training: bool = True

    def at(self, step: int, sample: int) -> None:
        """Move to a micro-batch."""
        self.step, self.sample = step, sample


def words(key: Key, shape: Sequence[int], part: Part = ()) -> np.ndarray:
    """Return uniformly distributed 64-bit words for a part of a global array.

    Args:
        key: Name of the array.
        shape: Global shape.
        part: The part to return.

    Raises:
        ArgumentError: If the part does not lie within the array.
    """
    bounds = _bounds(shape, part)
    extent = tuple(stop - start for start, stop in bounds)
    inner = len(shape)
    while inner > 0 and bounds[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    axis = max(inner - 1, 0)  # elements are consecutive from here on
    run = math.prod(extent[axis:])
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    starts = np.full((1,), sum(b[0] * s for b, s in zip(bounds, strides, strict=True)))
    for count, stride in zip(extent[:axis], strides[:axis], strict=True):
        starts = (starts[:, None] + np.arange(count) * stride).reshape(-1)
    result = np.empty((len(starts), run), np.uint64)
    if result.size:
        _fill(key, starts, result)
    return result.reshape(extent)


def uniform(key: Key, shape: Sequence[int], part: Part = (), dtype: Any = np.float64) -> np.ndarray:
    """Return numbers of [0, 1) with the full resolution of the type; arguments as for `words`."""
    kind = np.dtype(dtype)
    bits = np.finfo(kind).nmant + 1
    return ((words(key, shape, part) >> np.uint64(64 - bits)) * 2.0**-bits).astype(kind)


def normal(
    key: Key, shape: Sequence[int], part: Part = (), std: float = 1.0, dtype: Any = np.float64
) -> np.ndarray:
    """Return numbers of the normal distribution around 0; arguments as for `words`.

    Computed in float64 by the inverse of the distribution function, then rounded once.
    """
    u = ((words(key, shape, part) >> np.uint64(12)) + 0.5) * 2.0**-52
    return (_percentage_point(u.reshape(-1)).reshape(u.shape) * std).astype(dtype, copy=False)


def keep_mask(key: Key, drop: float, shape: Sequence[int], part: Part = ()) -> np.ndarray:
    """Return False with probability ``drop``, True otherwise; arguments as for `words`."""
    if not 0 <= drop < 1:
        raise ArgumentError(f"drop={drop} is not a probability in [0, 1)")
    return words(key, shape, part) >= np.uint64(int(drop * 2.0**64))


def integers(key: Key, high: int, shape: Sequence[int], part: Part = ()) -> np.ndarray:
    """Return integers of [0, high), uneven by at most ``high / 2**64``; otherwise like `words`."""
    if high < 1:
        raise ArgumentError(f"high={high}, expected at least 1")
    return (words(key, shape, part) % np.uint64(high)).astype(np.int64)


def normal_init(
    key: Key, std: float, axis: int | None = None, rank: int = 0, world_size: int = 1
) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Return a function of the shape of a rank's part that makes it, in float64.

    Args:
        key: Name of the parameter, which is normally distributed.
        std: Standard deviation.
        axis: Axis that is split over ranks; None: every rank has the whole.
        rank: The rank.
        world_size: Number of parts.
    """

    def init(shape: tuple[int, ...]) -> np.ndarray:
        whole, part = list(shape), [slice(0, count) for count in shape]
        if axis is not None:
            whole[axis] *= world_size
            part[axis] = slice(rank * shape[axis], (rank + 1) * shape[axis])
        return normal(key, whole, part, std)

    return init


def _bounds(shape: Sequence[int], part: Part) -> list[tuple[int, int]]:
    if len(part) > len(shape):
        raise ArgumentError(f"part has {len(part)} slices for an array of shape {tuple(shape)}")
    bounds = []
    for axis, count in enumerate(shape):
        piece = part[axis] if axis < len(part) else slice(None)
        start = 0 if piece.start is None else piece.start
        stop = count if piece.stop is None else piece.stop
        if piece.step not in (None, 1) or not 0 <= start <= stop <= count:
            raise ArgumentError(f"{piece} is not within axis {axis} of shape {tuple(shape)}")
        bounds.append((start, stop))
    return bounds


def _fill(key: Key, starts: np.ndarray, rows: np.ndarray) -> None:
    """Set row i to the words from ``starts[i]`` on."""
    philox = np.random.Philox(key=key.number(), counter=0)
    block = 0  # the next one it makes
    for start, row in zip(starts.tolist(), rows, strict=True):
        first, skip = divmod(start, _WORDS_PER_BLOCK)
        philox.advance(first - block)
        row[:] = philox.random_raw(skip + len(row))[skip:]
        block = first - (-(skip + len(row)) // _WORDS_PER_BLOCK)


def _percentage_point(u: np.ndarray) -> np.ndarray:
    """Return where the normal distribution function has the values ``u``; AS 241."""
    q = u - 0.5
    result = q * _ratio(_MIDDLE, 0.180625 - q * q)
    outer = np.flatnonzero(np.abs(q) > 0.425)
    r = np.sqrt(-_log(np.minimum(u[outer], 1 - u[outer])))
    tail = np.where(r <= 5, _ratio(_TAIL, r - 1.6), _ratio(_FAR, r - 5))
    result[outer] = np.copysign(tail, q[outer])
    return result


def _ratio(coefficients: tuple[str, str], x: np.ndarray) -> np.ndarray:
    above, below = (np.zeros_like(x), np.zeros_like(x))
    for value, text in ((above, coefficients[0]), (below, coefficients[1])):
        for c in reversed(text.split()):
            value *= x
            value += float(c)
    return above / below


def _log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm by ``2 artanh((m - 1) / (m + 1))``: the libraries' own differ in bits."""
    m, exponent = np.frexp(x)
    small = m < math.sqrt(0.5)
    m = np.where(small, 2 * m, m)
    s = (m - 1) / (m + 1)
    square, total = s * s, np.zeros_like(s)
    for k in range(25, 0, -2):
        total *= square
        total += 1 / k
    return 2 * s * total + (exponent - small) * math.log(2)
