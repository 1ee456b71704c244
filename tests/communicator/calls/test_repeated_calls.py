"""The short way of a call whose like was checked before: it must not let a bad one through."""

import contextlib
import gc
import re
import sys
import threading
import time

import numpy as np
import pytest

import pycoll
from pycoll.errors import ArgumentError, CommClosed, ConcurrentUseError, MismatchError
from pycoll.testing import run_processes, run_threads

F = np.ones(4)


CHANGES = {
    "read-only": (lambda x, out: out.setflags(write=False), r"read-only"),
    "dtype": (lambda x, out: (x, out.view(np.int64)), r"dtype int64"),
    "shape": (lambda x, out: (x, out.reshape(4, 16)), r"shape \(4, 16\)"),
    "strides": (lambda x, out: (x, out.T), r"not C-contiguous"),
    "overlap": (lambda x, out: (np.ravel(x)[:8], np.ravel(x)[4:12]), r"overlap"),
    "byte order": (lambda x, out: (x.view(">f8"), out.view(">f8")), r"byte order"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_call_like_one_that_was_right(run, what):
    change, text = CHANGES[what]

    def rank(comm):
        x, out = np.ones((8, 8)), np.ones((8, 8))
        for _ in range(3):
            comm.all_reduce(x, out=out)
            comm.all_reduce(np.ravel(x)[:8], out=np.ravel(out)[:8])
        changed = change(x, out) or (x, out)
        with pytest.raises(ArgumentError, match=text):
            comm.all_reduce(changed[0], out=changed[1])
        return float(comm.all_reduce(x).sum())

    assert run(2, rank) == [128.0] * 2


OPTIONS = {
    "op": ({"op": "mean"}, r"op='mean'"),
    "order": ({"order": "fast"}, r"order='fast'"),
    "algorithm": ({"algorithm": "best"}, r"'best'"),
    "timeout": ({"timeout": -1.0}, r"timeout=-1.0"),
    "timeout in the background": ({"timeout": 0.0, "async_op": True}, r"timeout=0.0"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_bad_options_after_good_ones(run, what):
    options, text = OPTIONS[what]

    def rank(comm):
        x, out = np.ones(8), np.ones(8)
        for _ in range(3):
            comm.all_reduce(x, out=out)
        with pytest.raises(ArgumentError, match=text):
            comm.all_reduce(x, out=out, **options)
        return float(comm.all_reduce(x, out=out)[0])

    assert run(2, rank) == [2.0] * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.all_reduce(F, opp="sum"),
        lambda c: c.all_reduce(F, "sum", F),
        lambda c: c.all_reduce(),
        lambda c: c.all_reduce(F, "sum", op="sum"),
        lambda c: c.barrier(F),
        lambda c: c.broadcast(F, order="tree"),
    ],
)
def test_signatures_are_those_of_python_functions(call):
    def rank(comm):
        with pytest.raises(TypeError, match=r"argument"):
            call(comm)
        return comm.all_reduce(np.arange(3.0)).tolist()

    assert run_threads(1, rank) == [[0.0, 1.0, 2.0]]


def test_a_transposed_input_after_a_straight_one(run):
    def rank(comm):
        x = np.arange(9.0).reshape(3, 3)
        results = [comm.all_reduce(a).tolist() for a in (x, x.T, x, x[::-1], x.copy("F"))]
        return results == [(2 * a).tolist() for a in (x, x.T, x, x[::-1], x)]

    assert run(2, rank) == [True, True]


def test_another_array_of_the_same_kind(run):
    """What is remembered are shapes and types, not addresses."""

    def rank(comm):
        totals = []
        for i in range(50):
            x, out = np.full(100, i), np.empty(100, int)
            assert comm.all_reduce(x, out=out) is out
            totals.append(int(out[0]) + int(comm.all_reduce(x)[-1]))
        return totals

    assert run(2, rank) == [[4 * i for i in range(50)]] * 2


def test_results_that_are_kept_do_not_change(run):
    def rank(comm):
        results = [comm.all_reduce(np.full(50, i)) for i in range(20)]
        return [int(result[7]) for result in results]

    assert run(2, rank) == [[2 * i for i in range(20)]] * 2


def test_private_and_symmetric_memory_in_turn(run):
    def rank(comm):
        arrays = [np.ones(20_000), comm.empty(20_000, np.float64)]
        arrays[1][:] = 1
        results = [float(comm.all_reduce(arrays[i % 2])[-1]) for i in range(10)]
        in_place = [float(comm.all_reduce(a, out=a)[0]) for a in arrays + arrays]
        return results, in_place

    assert run(3, rank) == [([3.0] * 10, [3.0, 3.0, 9.0, 9.0])] * 3


@pytest.mark.parametrize("turns", [(True, False), (False, True)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_new_results_in_symmetric_memory_and_elsewhere_in_turn(run, turns, asynchronous):
    """Where a result is made depends on `symmetric()`, not only on the arguments."""

    def rank(comm):
        x = comm.zeros(100_000)
        x += 1
        held = []
        for symmetric in turns * 3:
            with comm.symmetric() if symmetric else contextlib.nullcontext():
                total = comm.all_reduce(x, async_op=asynchronous)
            total = total.wait() if asynchronous else total
            assert float(total[-1]) == 2
            held.append(comm._session.memory.heap.contains(total.ctypes.data, total.nbytes))
        return held

    assert run(2, rank) == [list(turns * 3)] * 2


@pytest.mark.parametrize("count", [2, 1 << 20])
def test_other_threads_run_while_a_call_waits(run, count):
    def rank(comm):
        ticks, x = [0], np.ones(count)
        over = threading.Event()

        def tick():
            while not over.wait(0.001):
                ticks[0] += 1

        for _ in range(3):
            comm.all_reduce(x, out=x)
        if comm.rank == 1:
            time.sleep(0.5)
            comm.all_reduce(x, out=x)
            return x[0]
        thread = threading.Thread(target=tick)
        thread.start()
        before = ticks[0]
        comm.all_reduce(x, out=x)
        seen = ticks[0] - before
        over.set()
        thread.join()
        assert seen > 20, seen
        return x[0]

    assert run(2, rank) == [16.0] * 2


def test_the_line_of_every_short_call_is_told(run):
    def rank(comm):
        x = np.ones(2)

        def one():
            comm.all_reduce(x, out=x)

        def other():
            comm.broadcast(x)

        for _ in range(3):
            one()
        with pytest.raises(MismatchError) as caught:
            (one, other)[comm.rank]()
        return re.findall(r"test_repeated_calls.py:\d+ (\w+)\(\)", str(caught.value))

    assert run(2, rank) == [["one", "other"]] * 2


def at_the_next_new_line(function):
    """Run it, as a signal handler might be, while a call asks from which line it comes."""

    def watch(frame, event, _):
        if event == "return" and frame.f_code.co_name == "site":
            sys.setprofile(None)
            function()

    sys.setprofile(watch)


def test_a_close_while_a_call_asks_for_its_line():
    def rank(comm):
        x = np.ones(8)
        comm.all_reduce(x)
        at_the_next_new_line(comm.close)
        with pytest.raises(CommClosed):
            comm.all_reduce(x)
        return True

    assert run_processes(1, rank) == [True]


def test_other_calls_while_a_call_asks_for_its_line():
    def others(comm):
        for n in range(1, 1500):  # enough to take the place of every call that is remembered
            comm.all_reduce(np.ones(n, np.float32))

    def rank(comm):
        x = np.ones(10_000)
        comm.all_reduce(x)
        at_the_next_new_line(lambda: others(comm))
        return comm.all_reduce(x).shape

    assert run_processes(1, rank) == [(10_000,)]


def test_a_close_on_another_thread():
    def use(comm, x):
        with contextlib.suppress(CommClosed, ConcurrentUseError):
            while True:
                comm.all_reduce(x, out=x)

    def rank(comm):
        sys.setswitchinterval(1e-6)
        for _ in range(300):
            mine = comm.dup()
            thread = threading.Thread(target=use, args=(mine, np.ones(4096)))
            thread.start()
            time.sleep(0.0005)
            while thread.is_alive():
                with contextlib.suppress(ConcurrentUseError):
                    mine.close()
            thread.join()
        return True

    assert run_processes(1, rank) == [True]


def test_a_close_before_a_call_is_remembered():
    def rank(comm):
        mine = comm.dup()
        session = mine._session
        remembered = session.remembered

        def and_close(prepared):
            mine.close()
            return remembered(prepared)

        session.remembered = and_close
        # From one line, which is known the second time.
        calls = (float(mine.all_reduce(F)[0]) for _ in range(2))
        total = next(calls)
        with pytest.raises(CommClosed):
            next(calls)
        return total

    assert run_processes(1, rank) == [F[0]]


def test_a_communicator_used_by_what_is_freed_with_it():
    told = []

    class User:
        def __del__(self):
            try:
                self.comm.all_reduce(F)
            except CommClosed as error:
                told.append(str(error))

    user = User()
    user.comm = comm = pycoll.init()
    comm._user = user
    del user, comm
    gc.collect()
    assert len(told) == 1
