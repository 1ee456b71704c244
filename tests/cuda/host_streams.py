"""Streams, events and graphs of CuPy, on a device that does everything at once."""

import time


class Tape:
    """What is launched while a graph is captured: kept, and run when the graph is launched."""

    def __init__(self):
        self.items, self.captures = [], False

    def run(self, function, *args):
        if self.captures:
            self.items.append((function, args))
        else:
            function(*args)


TAPE = Tape()


class Graph:
    """What a tape has recorded."""

    def __init__(self, items):
        self._items = items

    def launch(self, stream):
        for function, args in self._items:
            function(*args)


class Stream:
    """A stream on which everything has already happened."""

    def begin_capture(self):
        TAPE.items, TAPE.captures = [], True

    def end_capture(self):
        TAPE.captures = False
        return Graph(TAPE.items)

    def synchronize(self):
        pass

    def __init__(self, ptr=0, non_blocking=False):
        self.ptr = 77 if non_blocking else ptr

    def record(self):
        return Event()

    def wait_event(self, event):
        pass

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
        self.ptr, self.when = 5, 0.0

    def record(self, stream=None):
        self.when = time.perf_counter()

    def synchronize(self):
        pass


class Device:
    """The only device."""

    def __init__(self, index=0):
        self.id = int(index)

    __enter__ = Stream.__enter__
    __exit__ = Stream.__exit__
