"""Tensors that say they are on a CUDA device, and streams that take notes: PyTorch without CUDA.

Their memory is the host's, and so is the code of the kernels that work on it.
"""

import contextlib
import threading

import torch


class DeviceTensor(torch.Tensor):
    """A tensor over host memory that is used as one of a device; so is what is made of it."""

    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **options):
        return torch.Tensor.__dlpack__(self.as_subclass(torch.Tensor))

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()

    def record_stream(self, stream):
        Cuda.notes.append(("keep", stream.cuda_stream))


def on_device(tensor):
    """Return a tensor as one of the device."""
    return tensor.as_subclass(DeviceTensor)


class Stream:
    """A stream on which everything happens at once; it notes who waits for whom."""

    def __init__(self, handle):
        self.cuda_stream = handle

    def record_event(self):
        Cuda.notes.append(("record", self.cuda_stream))
        return Event(self.cuda_stream)

    def wait_event(self, event):
        Cuda.notes.append(("wait", self.cuda_stream, event.stream))


class Event:
    """A place on a stream."""

    def __init__(self, stream):
        self.stream = stream

    def query(self):
        return True


class Cuda:
    """As much of ``torch.cuda`` as the backend uses."""

    notes = []  # noqa: RUF012 - of all ranks, which are threads
    made = 100

    def __init__(self):
        self._now = threading.local()

    def current_stream(self, device=None):
        return getattr(self._now, "stream", None) or Stream(7)

    def Stream(self, device):
        Cuda.made += 1
        return Stream(Cuda.made)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._now.stream = getattr(self._now, "stream", None), stream
        yield
        self._now.stream = before

    def device(self, device):
        return contextlib.nullcontext()

    def synchronize(self, device):
        Cuda.notes.append(("synchronize", device))
