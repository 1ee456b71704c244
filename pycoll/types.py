"""Words that every layer shares: data types, reduction operations, kinds of collective.

The numbers of `DType` and `ReduceOp` are the ones in ``csrc/base/types.h``; a test compares them.
"""

from __future__ import annotations

import functools
import re
import zlib
from enum import IntEnum

from pycoll.errors import ArgumentError


class DType(IntEnum):
    """Element types that reductions understand."""

    INT8 = 0
    INT16 = 1
    INT32 = 2
    INT64 = 3
    UINT8 = 4
    UINT16 = 5
    UINT32 = 6
    UINT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT32 = 10
    FLOAT64 = 11
    BOOL = 12
    FLOAT8_E4M3FN = 13
    FLOAT8_E5M2 = 14

    @property
    def itemsize(self) -> int:
        """Size of one element, in bytes."""
        return (1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1, 1)[self]

    @property
    def is_float(self) -> bool:
        """Whether the type is a floating-point type."""
        return self >= DType.FLOAT16 and self != DType.BOOL

    @property
    def rounds_once(self) -> bool:
        """Whether folds accumulate in float32 and round once (the floats of 8 and 16 bits)."""
        return self.is_float and self.itemsize <= 2


ML_DTYPES = {
    dtype.name.lower(): dtype for dtype in (DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
}
"""Types that NumPy has from the package ml_dtypes only, by their names there."""

_NAMED = (*(dtype.name.lower() for dtype in DType), "complex64", "complex128", "object")
_LOW, _HIGH = 0x100 - 32, 0x100  # values that the two bytes of a digest can have
_UNITS = "Y M W D h m s ms us ns ps fs as".split()  # of dates and times
_LONGEST_TEXT = 32  # characters, of the types of texts that errors name


@functools.lru_cache(maxsize=256)
def type_code(name: str) -> int:
    """Return the number that stands for an element type in a call descriptor.

    It is that of the `DType`, or one of the next numbers, for the types that are folded as other
    ones. All else can only be moved, and a call that moves has no operation: its code takes that
    byte of the descriptor as well. Two such types are taken for the same by chance, with a
    probability of 1 in 57344; never is one of them taken for a type with a number of its own.

    Args:
        name: Name of the type, with everything in it that makes a difference.
    """
    if name in _NAMED:
        return _NAMED.index(name)
    digest = zlib.crc32(name.encode())
    return 32 + digest % _LOW | digest // _LOW % _HIGH << 8


def type_name(code: int) -> str:
    """Return the name of the element type with a code, the same on every rank.

    Of the types that can only be moved those of dates, times and short texts have names, the others
    a number.
    """
    return _NAMED[code] if code < len(_NAMED) else _only_moved().get(code, f"dtype#{code}")


@functools.cache
def _only_moved() -> dict[int, str]:
    """Return names of types that can only be moved, by their codes."""
    names = ["float128", "complex256"]
    names += [f"{kind}[{unit}]" for unit in _UNITS for kind in ("datetime64", "timedelta64")]
    for length in range(1, _LONGEST_TEXT + 1):
        names += [f"str{32 * length}", f"bytes{8 * length}"]
    return {type_code(name): name for name in names}


def type_bytes(name: str) -> int:
    """Return the size of an element type by its name; 1 for one that is known by a number only."""
    others = {"bool": 1, "complex64": 8, "complex128": 16}
    known = DType.__members__.get(name.upper())
    return known.itemsize if known is not None else others.get(name, 1)


class ReduceOp(IntEnum):
    """Reduction operations; AND, OR and XOR are for integers only."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4
    AND = 5
    OR = 6
    XOR = 7

    @property
    def rounds(self) -> bool:
        """Whether results on floats depend on the order in which they are combined."""
        return self in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG)


_OPS = {op.name.lower(): op for op in ReduceOp}
_ELSEWHERE = {  # what other libraries call them
    **{
        "add": "sum",
        "+": "sum",
        "mean": "avg",
        "average": "avg",
        "mul": "prod",
        "multiply": "prod",
    },
    **{"*": "prod", "all": "and", "&": "and", "any": "or", "|": "or", "^": "xor"},
    **{"product": "prod", "minimum": "min", "maximum": "max", "lor": "or", "bor": "or"},
}
_WITH_RANKS = {"maxloc": "maxloc", "argmax": "maxloc", "minloc": "minloc", "argmin": "minloc"}


def reduce_op(name: object) -> ReduceOp:
    """Return the operation that a name, spelled exactly, stands for.

    Raises:
        ArgumentError: There is none; the text lists what is accepted, and the likeliest one.
    """
    if isinstance(name, str) and name in _OPS:
        return _OPS[name]
    if callable(name):
        word = getattr(name, "__name__", "")
        if word := _ELSEWHERE.get(word, word if word in _OPS else ""):
            raise ArgumentError(f"op={name!r}: pass the name of the operation, op={word!r}")
        raise ArgumentError(
            f"op={name!r} is a function; all_reduce, reduce, reduce_scatter, scan and exscan take "
            f"one, on host arrays; accepted here: {', '.join(_OPS)}"
        )
    if hasattr(name, "__array_interface__"):
        raise ArgumentError("op is an array; pass the array for the result by name, as out=")
    import difflib  # takes long, and seldom is a name unknown

    word = re.sub("^(mpi|logical|bitwise)_", "", str(name).rpartition(".")[2].lower())
    if call := _WITH_RANKS.get(word):
        raise ArgumentError(f"op={name!r} is a call of its own: comm.{call}(x)")
    word = _ELSEWHERE.get(word, word)
    close = difflib.get_close_matches(word, _OPS, n=1, cutoff=0.75)  # "norm" is not "or"
    hint = f"; did you mean {close[0]!r}?" if close else ""
    hint = "; a root goes by name, as in root=0" if isinstance(name, int) else hint
    raise ArgumentError(
        f"op={name!r} is not known; accepted: {', '.join(_OPS)}, and functions of two arrays{hint}"
    )


class Kind(IntEnum):
    """Kinds of collective, as they stand in a call descriptor."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    ALL_GATHER_V = 10
    REDUCE_SCATTER_V = 11
    GATHER_V = 12
    SCATTER_V = 13
    ALL_TO_ALL_V = 14
    SPLIT = 15
    CHECK = 16
    SCAN = 17
    EXSCAN = 18
    BROADCAST_OBJECT = 19
    ALL_GATHER_OBJECT = 20
    GATHER_OBJECT = 21
    SCATTER_OBJECT = 22
    ALL_TO_ALL_OBJECT = 23
    REFUSED = 255


class Order(IntEnum):
    """Reduction orders a call can ask for."""

    ANY = 0
    TREE = 1
    RANK = 2
