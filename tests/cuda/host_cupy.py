"""As much of CuPy as pycoll uses, over host memory: for kernels compiled for the host."""

import ctypes
import types

import numpy as np

from cuda.host_streams import TAPE, Device, Event, Stream


class Pointer(tuple):
    """Where memory is: address, bytes and owner; moves on by a number of bytes."""

    ptr = property(lambda self: self[0])

    def __new__(cls, address, nbytes, owner):
        return super().__new__(cls, (address, nbytes, owner))

    def __add__(self, offset):
        return Pointer(self[0] + offset, self[1] - offset, self[2])


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """As much of ``cupy.ndarray`` as pycoll uses; like that, nothing makes a NumPy array of it."""

    def __init__(self, values, base=None):
        self._values, self.base = np.asarray(values), base

    def _view(self, values):
        """Make an array in the memory of this one, if it is there."""
        if not np.may_share_memory(values, self._values):
            return DeviceArray(values)
        return DeviceArray(values, self if self.base is None else self.base)

    def __array__(self, *args, **options):
        raise TypeError("Implicit conversion to a NumPy array is not allowed; use .get()")

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        into = {} if out is None else {"out": tuple(map(_values_of, out))}
        with np.errstate(all="ignore"):  # a device does not warn
            found = getattr(ufunc, method)(*map(_values_of, inputs), **into, **options)
        return _on_device(found) if out is None else out[0]

    def __array_namespace__(self, api_version=None):
        return NAMESPACE

    @property
    def __cuda_array_interface__(self):
        facts = dict(self._values.__array_interface__)
        return {**facts, "version": 3, "stream": None}

    shape = property(lambda self: self._values.shape)
    strides = property(lambda self: self._values.strides)
    dtype = property(lambda self: self._values.dtype)
    ndim = property(lambda self: self._values.ndim)
    size = property(lambda self: self._values.size)
    nbytes = property(lambda self: self._values.nbytes)
    flags = property(lambda self: self._values.flags)
    device = property(lambda self: Device())
    T = property(lambda self: self._view(self._values.T))
    data = property(
        lambda self: Pointer(self._values.ctypes.data, self._values.nbytes, self._values)
    )

    def __len__(self):
        return len(self._values)

    def __getitem__(self, key):
        return self._view(self._values[_values_of(key)])

    def __setitem__(self, key, other):
        with np.errstate(all="ignore"):
            self._values[_values_of(key)] = _values_of(other)

    def __bool__(self):
        return bool(self._values)

    def __int__(self):
        return int(self._values)

    def __float__(self):
        return float(self._values)

    __hash__ = None

    def __dlpack_device__(self):
        return 2, 0

    def view(self, dtype):
        return self._view(self._values.view(dtype))

    def fill(self, value):
        self._values.fill(value)

    def all(self):
        return DeviceArray(self._values.all())

    def any(self):
        return DeviceArray(self._values.any())

    def sum(self, axis=None):
        return DeviceArray(self._values.sum(axis))

    def reshape(self, *shape):
        return self._view(self._values.reshape(*shape))

    def transpose(self, axes):
        return self._view(self._values.transpose(axes))

    def astype(self, dtype, copy=True):
        with np.errstate(all="ignore"):
            return DeviceArray(self._values.astype(dtype, copy=copy))

    def copy(self):
        return DeviceArray(self._values.copy())

    def get(self):
        return self._values.copy()


DeviceArray.__module__ = "cupy"


def _values_of(x):
    """Return what lies behind arrays, also in a tuple; refuse arrays of NumPy, as CuPy does."""
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(x, (tuple, list)):
        return type(x)(map(_values_of, x))
    return getattr(x, "_values", x)


def _on_device(x):
    if isinstance(x, tuple):
        return tuple(map(_on_device, x))
    return DeviceArray(x) if isinstance(x, (np.ndarray, np.generic)) else x


class Function:
    """A function of NumPy for arrays on the device."""

    def __init__(self, function):
        self._function = function

    def __call__(self, *args, device=None, **options):
        named = {name: _values_of(value) for name, value in options.items()}
        with np.errstate(all="ignore"):
            return _on_device(self._function(*map(_values_of, args), **named))

    def __getattr__(self, name):
        return Function(getattr(self._function, name))


class Namespace:
    """The functions of NumPy for arrays on the device, which `asarray` brings there."""

    def __getattr__(self, name):
        found = getattr(np, name)
        return found if isinstance(found, type) or not callable(found) else Function(found)

    @staticmethod
    def asarray(x, dtype=None, device=None):
        if isinstance(x, DeviceArray):
            return x if dtype is None else x.astype(dtype, copy=False)
        return DeviceArray(np.array(x, dtype))


NAMESPACE = Namespace()


class _Arrays(type):
    """Takes every array for one of CuPy."""

    def __instancecheck__(cls, x):
        return isinstance(x, DeviceArray)


class ndarray(metaclass=_Arrays):
    """Makes an array over memory that somebody else owns."""

    def __new__(cls, shape, dtype, memory, strides=None):
        pointer, nbytes, owner = memory
        raw = (ctypes.c_uint8 * nbytes).from_address(pointer)
        raw._owner = owner
        return DeviceArray(np.ndarray(shape, dtype, raw, 0, strides))


def _runtime(calls):
    def note(name, result=None):
        return lambda *args, **options: (calls.append((name, *args)), result)[1]

    return types.SimpleNamespace(
        eventDisableTiming=2,
        eventCreateWithFlags=note("create", 9),
        eventDestroy=note("destroy"),
        eventRecord=note("record"),
        streamWaitEvent=note("wait"),
        streamIsCapturing=lambda stream: TAPE.captures,
        memcpyAsync=lambda dst, src, nbytes, kind, stream: TAPE.run(
            ctypes.memmove, dst, src, nbytes
        ),
        deviceSynchronize=note("synchronize"),
        memcpyDefault=4,
        CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
    )


def cupy_module():
    """Make a module to be put in the place of ``cupy``."""
    calls = []

    runtime = _runtime(calls)
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        get_current_stream=lambda: Stream.null,
        Stream=Stream,
        Event=Event,
        get_elapsed_time=lambda first, last: 1e3 * (last.when - first.when),
        Device=Device,
        alloc_pinned_memory=bytearray,
        runtime=runtime,
        UnownedMemory=lambda pointer, nbytes, owner, device: (pointer, nbytes, owner),
        MemoryPointer=lambda memory, offset: memory,
    )

    return types.SimpleNamespace(
        __name__="cupy",
        calls=calls,
        cuda=cuda,
        **{name: getattr(np, name) for name in ("uint8", "float32", "int32")},
        arange=lambda count, dtype: DeviceArray(np.arange(count, dtype=dtype)),
        full=lambda shape, value, dtype: DeviceArray(np.full(shape, value, dtype)),
        ones=lambda shape, dtype: DeviceArray(np.ones(shape, dtype)),
        zeros=lambda shape, dtype: DeviceArray(np.zeros(shape, dtype)),
        empty_like=lambda x: DeviceArray(np.full_like(x._values, 99)),
        copyto=lambda x, y: x.__setitem__(..., y),
        __version__="0",
        ndarray=ndarray,
        empty=lambda shape, dtype: DeviceArray(np.full(shape, 99).astype(dtype)),
        asarray=lambda x: DeviceArray(x.copy()) if isinstance(x, np.ndarray) else x,
        array=lambda x, order="K", copy=True: DeviceArray(
            np.array(x._values, order="C", copy=True)
        ),
    )
