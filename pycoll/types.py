"""Words that every layer shares: data types, reduction operations, kinds of collective.

The numbers of `DType` and `ReduceOp` are the ones in ``csrc/types.h``; a test compares them.
"""

from __future__ import annotations

from enum import IntEnum


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

    @property
    def itemsize(self) -> int:
        """Size of one element, in bytes."""
        return (1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8)[self]

    @property
    def is_float(self) -> bool:
        """Whether the type is a floating-point type."""
        return self >= DType.FLOAT16

    @property
    def rounds_once(self) -> bool:
        """Whether folds accumulate in float32 and round once (the 16-bit floats)."""
        return self in (DType.FLOAT16, DType.BFLOAT16)


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
    REFUSED = 255


class Order(IntEnum):
    """Reduction orders a call can ask for."""

    ANY = 0
    TREE = 1
    RANK = 2
