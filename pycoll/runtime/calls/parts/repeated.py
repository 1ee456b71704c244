"""V-variants like earlier ones: only their sizes are exchanged, and compared with those of then."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pycoll import _C
from pycoll.runtime.calls.parts.exchange import exchange
from pycoll.runtime.calls.prepared import Prepared
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_KEPT = "repeated v-variants"
_MOST_KEPT = 8
_NAMED_ALIKE = "mMV"  # kinds of dtypes that may be equal and yet have other names: 1000 ms and 1 s

Key = tuple[Any, ...]


class Repeated(NamedTuple):
    """What a call before this one has found out."""

    row: np.ndarray  # what this rank says of its sizes
    table: bytes  # what all ranks said
    binding: _C.BoundCall
    shape: tuple[int, ...] | None  # of the result; None where there is none
    address_call: _C.AddressCall | None


def key_of(kind: Kind, x: Any, out: Any, *options: Any) -> Key | None:
    """Return what two calls have in common that are alike, but for sizes of other ranks.

    Of a call that needs a closer look it is None. `options` are numbers, or a list of them.
    """
    if type(x) is not np.ndarray or _C.stretch(x, False) is None or not _takes(out, x):
        return None
    found: list[Any] = [None if out is None else out.shape]
    for option in options:
        if type(option) is list and all(type(number) is int for number in option):
            found.append(tuple(option))
        elif type(option) is np.ndarray and option.dtype == np.int64 and option.ndim == 1:
            found.append((option.tobytes(),))
        elif type(option) is int:
            found.append(option)
        else:
            return None
    return None if x.dtype.kind in _NAMED_ALIKE else (kind, x.dtype, x.shape, *found)


def _takes(out: Any, x: np.ndarray) -> bool:
    """Return whether `out`, if there is one, takes a result of the type of `x`, apart from it."""
    if out is None:
        return True
    if type(out) is not np.ndarray or out.dtype != x.dtype:
        return False
    target = _C.stretch(out, True)
    if target is None:
        return False
    (begin, nbytes), (mine, size) = target, _C.stretch(x, False)
    return begin + nbytes <= mine or mine + size <= begin


def again(
    session: Session, kind: Kind, key: Key | None, x: np.ndarray, out: Any, timeout: float | None
) -> tuple[bool, Any]:
    """Make a call that is like an earlier one.

    Returns:
        True and its result; or False and what ranks said of their sizes, which are other ones now,
        or False and None for the first call of its kind.
    """
    call = None if key is None else session.kept.get(_KEPT, {}).get(key)
    if call is None:
        return False, None
    limit = session.refusing(lambda: session.limit(timeout))
    table = exchange(session, kind, call.row, limit)
    if table.tobytes() != call.table:
        return False, table
    return True, session.start(session.refusing(lambda: _prepare(call, x, out)), limit, False)


def _prepare(call: Repeated, x: np.ndarray, out: Any) -> Prepared:
    result = np.empty(call.shape, x.dtype) if out is None and call.shape is not None else out
    target = 0 if result is None else _C.address(result)
    made = Prepared(call.binding, _C.address(x), target, result, (x, result))
    made.address_call = call.address_call
    return made


def remember(
    session: Session, key: Key, row: np.ndarray, table: np.ndarray, call: tuple[Any, Any]
) -> None:
    """Note what was found out in a call that has succeeded: its binding, and its result."""
    kept = session.kept.setdefault(_KEPT, {})
    if len(kept) >= _MOST_KEPT:
        kept.clear()
    binding, result = call
    shape = None if result is None else result.shape
    quick = session.address_call(binding)
    kept[key] = Repeated(row, table.tobytes(), binding, shape, quick)
