"""Calls in the background: in order, one at a time, whichever thread runs them."""

import os
import random
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
dist = pytest.importorskip("torch.distributed")

from pycoll.errors import ConcurrentUseError  # noqa: E402
from pycoll.torch.calls.background import Background  # noqa: E402
from worlds_torch import run_group  # noqa: E402

LIMIT_S = 20


@pytest.fixture
def background():
    made = Background("test")
    yield made
    made.stop()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("waiters", [0, 1, 3])
def test_in_order_and_one_at_a_time(background, waiters):
    ran, running = [], []

    def job(i):
        assert not running
        running.append(i)
        if i % 37 == 0:
            time.sleep(0.0005)
        running.pop()
        ran.append(i)

    works = [background.submit(lambda i=i: job(i), []) for i in range(2000)]

    def wait(seed):
        order = random.Random(seed).sample(range(len(works)), 200)
        for i in order:
            works[i].wait()
            assert len(ran) > i

    threads = [threading.Thread(target=wait, args=(seed,)) for seed in range(waiters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    background.stop()
    assert ran == list(range(2000))
    assert not background.busy


def test_nothing_is_left_when_helpers_stop_early(background):
    """What comes after the call that is waited for is run by the thread of the background."""
    for _ in range(300):
        works = [background.submit(lambda: None, []) for _ in range(5)]
        works[1].wait()
        until = time.monotonic() + LIMIT_S
        while not works[4].is_completed():
            assert time.monotonic() < until, "a call was forgotten"
            time.sleep(0)


def test_a_wait_does_not_overtake_what_runs(background):
    go, here = threading.Event(), []
    first = background.submit(go.wait, [])
    time.sleep(0.05)  # the background has begun it
    second = background.submit(lambda: here.append(threading.current_thread()), [])
    waiter = threading.Thread(target=second.wait)
    waiter.start()
    time.sleep(0.05)
    assert not here, "the second call overtook the first"
    go.set()
    waiter.join(LIMIT_S)
    assert first.is_completed()
    assert here


def test_a_wait_runs_what_no_thread_has_begun(background, monkeypatch):
    monkeypatch.setattr(background, "_start", lambda: None)
    here = []
    works = [background.submit(lambda: here.append(threading.current_thread()), []) for _ in "123"]
    works[1].wait()
    assert here == [threading.current_thread()] * 2
    assert not works[2].is_completed()
    works[2].wait()


def test_an_interrupt_of_a_helper_is_raised_there(background, monkeypatch):
    monkeypatch.setattr(background, "_start", lambda: None)

    def interrupted():
        raise KeyboardInterrupt

    one, two = background.submit(interrupted, []), background.submit(lambda: None, [])
    with pytest.raises(KeyboardInterrupt):
        two.wait()
    two.wait()
    assert two.is_success()
    with pytest.raises(KeyboardInterrupt):
        one.wait()


@pytest.mark.parametrize("helped", [True, False])
def test_callbacks_may_wait_for_later_calls(background, helped):
    later, seen = [], []

    def callback(_):
        later[0].wait()
        seen.append(later[0].is_completed())

    hold = threading.Event()
    background.submit(hold.wait, [])
    first = background.submit(lambda: None, [])
    future = first.get_future().then(callback)
    later.append(background.submit(lambda: None, []))
    hold.set()
    if helped:
        first.wait()
    future.wait()
    assert seen == [True]


def test_many_calls_on_one_tensor_waited_for_in_any_order():
    def body(rank, n):
        order = random.Random(5)
        for round_ in range(30):
            x = torch.ones(7, dtype=torch.int64)
            works = [dist.all_reduce(x, async_op=True) for _ in range(10)]
            for work in order.sample(works, 3 if round_ % 2 else 10):
                work.wait()
            dist.all_reduce(x)
            assert (x == n**11).all()

    run_group(3, body)


@pytest.mark.parametrize("background", [False, True])
def test_a_call_inside_of_a_signal_handler(background):
    def body(rank, n):
        seen = []
        if background:  # no thread begins the call, so it is run by whoever waits
            dist.group.WORLD._caller.background._start = lambda: None

        def handler(*_):
            with pytest.raises((dist.DistBackendError, ConcurrentUseError), match="inside a call"):
                dist.all_reduce(torch.ones(2))
            seen.append(1)

        signal.signal(signal.SIGUSR2, handler)
        dist.barrier()
        if rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        else:
            time.sleep(0.6)
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=background)
        if background:
            work.wait()
        assert (x == n).all()
        assert len(seen) == (rank == 0)

    run_group(2, body)


def test_a_group_that_is_destroyed_during_a_call_of_another_thread():
    def body(rank, n):
        errors = []

        def call():
            try:
                dist.all_reduce(torch.ones(3))
            except dist.DistBackendError as error:
                errors.append(str(error))

        dist.barrier()
        if rank == 0:
            thread = threading.Thread(target=call)
            thread.start()
        time.sleep(0.3 if rank == 0 else 1.0)
        dist.destroy_process_group()
        if rank == 0:
            thread.join()
            assert "PeerLeft: rank 1" in errors[0]

    run_group(2, body)
