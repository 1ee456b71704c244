"""Python objects as bytes: msgpack, from which only data can come, or pickle where it is asked for.

msgpack knows None, bool, int, float, str, bytes, list and dict. A tuple, set or frozenset is a list
that begins with a mark, so that reading one takes no stack, however deep it lies. What else is
accepted travels as one of msgpack's extension types: complex, large int, and NumPy's arrays and
scalars: type and shape before the bytes, or a .npy file for records. Reading never runs code that
came with the bytes.
"""

from __future__ import annotations

import functools
import io
import pickle as pickling
import struct
from typing import Any, Literal

import numpy as np

from pycoll.errors import ArgumentError, kind_of

_DATA, _PICKLE = b"m", b"p"  # the first byte
_IS_PICKLE = _PICKLE[0]
_MOST_KEPT = 64 << 10  # bytes that a packer has packed that is used again
# The last ones: programs that use msgpack have the first ones for types of their own.
_FIRST = 117
_TUPLE, _SET, _FROZENSET, _COMPLEX, _INT, *_OF_NUMPY = range(_FIRST, 128)
_ARRAY, _SCALAR, _PLAIN_ARRAY, _PLAIN_SCALAR = _OF_NUMPY[:4]
_STR, _BYTES = _OF_NUMPY[4:]  # which may end in zeros; arrays of them may not
_PLAIN_KINDS = "?biufcmMSU"  # of elements that the name of their type tells all of
# Before plain arrays: bytes of the name, dimensions, and whether it lies by columns.
_PLAIN_HEAD = struct.Struct("<BBB")
_GROUPS = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_MAKE = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}


def pack(x: Any, pickle: bool) -> bytes:
    """Return an object as bytes.

    Raises:
        ArgumentError: If it, or something in it, is of a type that is not accepted.
    """
    if pickle:
        return _PICKLE + pickling.dumps(x)
    return _DATA + _packed(x)


def unpack(data: bytes | memoryview, pickle: bool, sender: int) -> Any:
    """Return the object that a rank has packed.

    Raises:
        ArgumentError: If it was pickled, and this rank has not said that it trusts it.
    """
    if data[0] == _IS_PICKLE:
        if not pickle:
            raise ArgumentError(
                f"rank {sender} sent a pickle, which can run any code when it is read; if you "
                "trust it, pass pickle=True here, too"
            )
        return pickling.loads(data[1:])
    return _unpacked(data[1:])


@functools.cache
def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError:
        raise ArgumentError(
            "objects travel as msgpack, which is not installed: pip install msgpack; or pass "
            "pickle=True on all ranks"
        ) from None
    return msgpack


_PACKERS: list[Any] = []  # that are not in use: making one takes longer than packing a small object


def _packed(x: Any) -> bytes:
    try:
        packer = _PACKERS.pop()
    except IndexError:
        packer = _msgpack().Packer(default=_extension, strict_types=True)
    try:
        data: bytes = packer.pack(x)
        if len(data) <= _MOST_KEPT:  # it keeps as much memory
            _PACKERS.append(packer)
        return data
    except ArgumentError:
        raise
    except (ValueError, OverflowError) as error:  # nested too deeply, or too large
        raise ArgumentError(f"this object cannot be sent: {error}") from None


def _unpacked(data: bytes | memoryview) -> Any:
    read = _msgpack().unpackb
    return read(data, ext_hook=_extended, list_hook=_grouped, strict_map_key=False)


def _extension(x: Any) -> Any:
    """Return what msgpack knows for what it does not know."""
    code = _GROUPS.get(type(x))
    if code is not None:
        return [_msgpack().ExtType(code, b""), *x]
    if type(x) is complex:
        code, body = _COMPLEX, struct.pack("<dd", x.real, x.imag)
    elif type(x) is int:
        code, body = _INT, x.to_bytes(x.bit_length() // 8 + 1, "little", signed=True)
    elif type(x) is np.str_:
        code, body = _STR, x.encode(errors="surrogatepass")
    elif type(x) is np.bytes_:
        code, body = _BYTES, bytes(x)
    elif type(x) is np.ndarray or (isinstance(x, np.generic) and type(x) is x.dtype.type):
        array = np.asarray(x)
        if array.dtype.kind in _PLAIN_KINDS and array.dtype.itemsize:
            code, body = _PLAIN_ARRAY, _plain(array)
        else:
            code, body = _ARRAY, _as_file(array)
        code += type(x) is not np.ndarray
    else:
        raise ArgumentError(
            f"{kind_of(x)} cannot be sent as data; accepted are None, bool, int, float, complex, "
            "str, bytes, list, tuple, set, dict and NumPy arrays, also inside of each other; for "
            "anything else pass pickle=True on all ranks, if they trust each other"
        )
    return _msgpack().ExtType(code, body)


def _extended(code: int, body: bytes) -> Any:
    """Return what an extension type stands for."""
    if code in _MAKE:
        return _MAKE[code]  # the mark
    if code < _FIRST:
        raise ArgumentError(f"a msgpack.ExtType came, of type {code}: it cannot be sent as data")
    if code == _COMPLEX:
        return complex(*struct.unpack("<dd", body))
    if code == _INT:
        return int.from_bytes(body, "little", signed=True)
    if code == _STR:
        return np.str_(body.decode(errors="surrogatepass"))
    if code == _BYTES:
        return np.bytes_(body)
    plain = code in (_PLAIN_ARRAY, _PLAIN_SCALAR)
    array = _of_plain(body) if plain else np.load(io.BytesIO(body), allow_pickle=False)
    return array[()] if code in (_SCALAR, _PLAIN_SCALAR) else array


def _grouped(items: list[Any]) -> Any:
    """Return a list, or what it stands for if it begins with a mark."""
    if items and type(items[0]) is type:
        return items[0](items[1:])
    return items


def _plain(x: np.ndarray) -> bytes:
    name = x.dtype.str.encode()
    order: Literal["F", "C"] = "F" if x.flags.fnc else "C"
    head = _PLAIN_HEAD.pack(len(name), x.ndim, order == "F"), name
    shape = struct.pack(f"<{x.ndim}q", *x.shape)
    return b"".join((*head, shape, x.ravel(order).view(np.uint8).data))


def _of_plain(body: bytes) -> np.ndarray:
    length, ndim, by_columns = _PLAIN_HEAD.unpack_from(body)
    at = _PLAIN_HEAD.size + length
    dtype = np.dtype(body[_PLAIN_HEAD.size : at].decode())
    if dtype.kind not in _PLAIN_KINDS:
        raise ValueError(f"an array of dtype {dtype} does not come like this")
    shape = struct.unpack_from(f"<{ndim}q", body, at)
    order: Literal["F", "C"] = "F" if by_columns else "C"
    return np.ndarray(shape, dtype, body, at + 8 * ndim, order=order).copy("K")


def _as_file(x: np.ndarray) -> bytes:
    known = np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(x.dtype))
    if x.dtype.hasobject or known != x.dtype:
        raise ArgumentError(f"an array of dtype {x.dtype} cannot be sent as data; convert it")
    file = io.BytesIO()
    np.save(file, x, allow_pickle=False)
    return file.getvalue()
