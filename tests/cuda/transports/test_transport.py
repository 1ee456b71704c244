"""Calls that were made on the device, and are kept."""

import numpy as np

import pycoll
from cuda.host_cupy import TAPE, DeviceArray, Stream
from pycoll.cuda.transports import bound_calls


def test_no_limit_becomes_the_default():
    """Which is what the device library takes 0 for."""
    assert [bound_calls.nanoseconds(s) for s in (1e-12, 0.5, 1e9)] == [1, 500_000_000, 10**18]


def test_nothing_is_freed_while_a_graph_is_captured(host_kernels, monkeypatch):
    """It would wait for the device, which ends the capture; afterwards there is room again."""
    monkeypatch.setattr(bound_calls, "_MAX_CALLS", 2)
    freed, call = [], host_kernels.call

    def note(name, *arguments):
        if name == "call_destroy":
            freed.append(TAPE.captures)
        return call(name, *arguments)

    monkeypatch.setattr(host_kernels, "call", note)
    stream = Stream(5)
    with pycoll.virtual_ranks(2) as ranks:

        def run(count):
            xs = [DeviceArray(np.ones(count)) for _ in range(2)]
            ranks.all_reduce(xs, out=xs)
            return xs

        run(1), run(2), run(3)
        assert freed == [False]
        stream.begin_capture()
        captured = [run(count) for count in (4, 5, 6)]
        graph = stream.end_capture()
        assert freed == [False]
        run(7), run(8)
        assert freed == [False] * 3  # those of counts 2 and 3: the graph has the others
        graph.launch(stream)
        assert [xs[1].get()[0] for xs in captured] == [2.0] * 3
    assert len(freed) == 8
