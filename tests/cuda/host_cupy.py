"""As much of CuPy as pycoll uses, over host memory: for kernels compiled for the host."""

import ctypes
import types

import numpy as np


class DeviceArray:
    """As much of ``cupy.ndarray`` as pycoll uses."""

    def __init__(self, values):
        self._values = values

    @property
    def __cuda_array_interface__(self):
        facts = dict(self._values.__array_interface__)
        return {**facts, "version": 3, "stream": None}

    shape = property(lambda self: self._values.shape)
    dtype = property(lambda self: self._values.dtype)
    nbytes = property(lambda self: self._values.nbytes)
    data = property(lambda self: types.SimpleNamespace(ptr=self._values.ctypes.data))

    def __len__(self):
        return len(self._values)

    def __getitem__(self, key):
        return DeviceArray(self._values[key])

    def __dlpack_device__(self):
        return 2, 0

    def get(self):
        return self._values.copy()


DeviceArray.__module__ = "cupy"


class Stream:
    """A stream on which everything has already happened."""

    def __init__(self, ptr=0, non_blocking=False):
        self.ptr = 77 if non_blocking else ptr

    def __cuda_stream__(self):
        return 0, self.ptr

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    null = None
    from_external = staticmethod(lambda other: Stream(other.__cuda_stream__()[1]))


Stream.null = Stream()


class Event:
    """An event that has happened."""

    done = True

    def __init__(self, **options):
        self.ptr = 5

    def synchronize(self):
        pass


class Device:
    """The only device."""

    def __init__(self, index=0):
        self.id = int(index)

    __enter__ = Stream.__enter__
    __exit__ = Stream.__exit__


def cupy_module():
    """Make a module to be put in the place of ``cupy``."""
    calls = []

    def note(name, result=None):
        return lambda *args, **options: (calls.append((name, *args)), result)[1]

    runtime = types.SimpleNamespace(
        eventDisableTiming=2,
        eventCreateWithFlags=note("create", 9),
        eventDestroy=note("destroy"),
        eventRecord=note("record"),
        streamWaitEvent=note("wait"),
        streamIsCapturing=lambda stream: False,
        deviceSynchronize=note("synchronize"),
    )
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        get_current_stream=lambda: Stream.null,
        Stream=Stream,
        Event=Event,
        Device=Device,
        runtime=runtime,
        UnownedMemory=lambda pointer, nbytes, owner, device: (pointer, nbytes, owner),
        MemoryPointer=lambda memory, offset: memory,
    )

    def ndarray(shape, dtype, memory):
        pointer, nbytes, owner = memory
        raw = (ctypes.c_uint8 * nbytes).from_address(pointer)
        raw._owner = owner
        count = int(np.prod(shape))
        return DeviceArray(np.frombuffer(raw, dtype, count).reshape(shape))

    return types.SimpleNamespace(
        __name__="cupy",
        calls=calls,
        cuda=cuda,
        uint8=np.uint8,
        __version__="0",
        ndarray=ndarray,
        empty=lambda shape, dtype: DeviceArray(np.full(shape, 99).astype(dtype)),
        asarray=lambda x: x,
        array=lambda x, order="K", copy=True: DeviceArray(
            np.array(x._values, order="C", copy=True)
        ),
    )
