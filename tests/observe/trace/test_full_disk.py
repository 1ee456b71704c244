"""Traces that no disk takes to their end: the job goes on, and what is missing is counted."""

import os
import resource
import threading
import time
import warnings

import numpy as np

from pycoll.observe.report import text
from pycoll.observe.report.analysis import analyse
from pycoll.observe.trace.files import PACKED
from pycoll.observe.trace.merged import merge
from pycoll.testing import run_processes


def test_a_full_disk_ends_the_trace_and_not_the_job(tmp_path):
    """Of one communicator; others are traced on."""

    def rank(comm):
        other = comm.dup()
        x = np.ones(2)
        with warnings.catch_warnings(record=True) as told, comm.trace(tmp_path):
            warnings.simplefilter("always")
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, comm._session.observer.tracer._calls.fileno())
            deadline = time.monotonic() + 20
            while comm.all_reduce(int(not told and time.monotonic() < deadline)):
                other.all_reduce(x)
                time.sleep(0.01)
            total, calls = comm.all_reduce(x)[0], other.stats().collectives["all_reduce"].calls
        writers = sum(t.name == "pycoll trace" for t in threading.enumerate())
        return [str(w.message) for w in told], total, calls, writers

    for told, total, calls, writers in run_processes(2, rank):
        assert told == [
            "a trace ends early, for it cannot be written: [Errno 28] No space left on device"
        ]
        assert total == 2
        assert calls > 0
        assert writers == 0


def test_a_disk_that_is_full_at_the_end_is_told(tmp_path):
    def rank(comm):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with comm.trace(tmp_path):
                full = os.open("/dev/full", os.O_WRONLY)
                tracer = comm._session.observer.tracer
                for file in (tracer._calls, tracer._notes):
                    os.dup2(full, file.fileno())
                comm.all_reduce(np.ones(2))
        return [str(w.message) for w in told], comm.all_reduce(1)

    for told, total in run_processes(2, rank):
        assert len(told) == 1
        assert "[Errno 28] No space left on device" in told[0]
        assert total == 2


def test_calls_that_a_disk_does_not_take_are_lost(tmp_path):
    """They are counted as all others are, and so are those after them."""
    taken, calls = 100, 300

    def rank(comm):
        x = comm.zeros(1)
        with warnings.catch_warnings(record=True) as told, comm.trace(tmp_path):
            warnings.simplefilter("always")
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (taken * PACKED.itemsize + 5, before[1]))
            for i in range(calls):
                comm.all_reduce(x, out=x)
                if i == calls // 2:
                    comm.stats()  # which writes what there is
            counted = comm.stats().collectives["all_reduce"].calls
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return [str(w.message) for w in told], counted

    for told, counted in run_processes(2, rank):
        assert told == ["a trace ends early, for it cannot be written: [Errno 27] File too large"]
        assert counted == calls
    trace = merge(tmp_path)
    assert [stream.lost for stream in trace.streams] == 2 * [calls - taken]
    assert [stream.calls.size for stream in trace.streams] == 2 * [taken]
    assert {site.rpartition(" ")[2] for site in trace.groups[0].site} == {"rank()"}
    assert text.facts(analyse(trace))[-1] == (
        "400 calls are missing: the disk was too slow, or took no more"
    )
