"""Programs about calls in the background, threads, forks over MPI; each returns what was wrong."""

import gc
import os
import signal
import threading
import time

import numpy as np

import pycoll


def caught(call):
    """Return the name of the error that a call raises, and its text."""
    try:
        call()
    except (pycoll.CollError, MemoryError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def second_threads(comm):
    """Let a second thread use the communicator during a call: only that one gets an error."""
    n, wrong, names = comm.world_size, [], []

    def other():
        names.append(caught(lambda: comm.all_reduce(np.ones(9)))[0])

    for size in (3, 200_000):
        comm.barrier()
        if comm.rank == 0:
            thread = threading.Timer(0.2, other)
            thread.start()
            found = comm.all_reduce(np.ones(size))
            thread.join()
            wrong += [] if names.pop() == "ConcurrentUseError" else ["another error, or none"]
        else:
            time.sleep(0.5)
            found = comm.all_reduce(np.ones(size))
        wrong += [] if (found == n).all() else [f"{size}: {found[:3]}"]
    return wrong


def refused_behind(comm):
    """Refuse a call while others are in the background: they come first, and it goes on."""
    n, wrong = comm.world_size, []
    for _ in range(5):
        work = comm.all_reduce(np.ones(20_000), async_op=True)
        bad = comm.rank == n - 1
        name = caught(lambda bad=bad: comm.all_reduce("x" if bad else np.ones(3)))[0]
        wrong += [] if name == ("ArgumentError" if bad else "PeerRejected") else [name]
        wrong += [] if (work.wait() == n).all() else ["the call before it"]
        wrong += [] if comm.all_reduce(np.ones(3))[0] == n else ["the call behind it"]
    return wrong


def forks(comm):
    """Use the communicator in a child: an error there, and nothing happens to the job."""
    n, wrong = comm.world_size, []
    if comm.rank == 0:
        child = os.fork()
        if not child:
            os._exit(caught(lambda: comm.all_reduce(np.ones(3)))[0] != "ForkedError")
        wrong += [] if os.waitpid(child, 0)[1] == 0 else ["no ForkedError in the child"]
    return wrong if comm.all_reduce(np.ones(3))[0] == n else [*wrong, "the next call"]


def forks_under_way(comm):
    """Drop communicators in a child while their messages come: the parent gets all of them."""
    n, wrong, x = comm.world_size, [], np.ones(500_000)
    calls, mail = comm.dup(), comm.dup()
    work = calls.all_reduce(x, async_op=True) if comm.rank == 0 else None
    if comm.rank == 0:
        caught(lambda: mail.recv(np.empty(3), 1, 9, timeout=0.1))  # takes what else has been sent
        child = os.fork()
        if not child:
            signal.alarm(20)
            calls = mail = work = None
            gc.collect()
            os._exit(0)
        y = np.zeros_like(x)
        mail.recv(y, 1, 4)
        wrong += [] if (y == 1).all() else ["the message"]
        wrong += [] if os.waitpid(child, 0)[1] == 0 else ["the end of the child"]
    elif comm.rank == 1:
        mail.send(x, 0, 4)
        time.sleep(0.3)
    total = calls.all_reduce(x) if work is None else work.wait()
    return wrong if (total == n).all() else [*wrong, "the sum"]


def forks_asking(comm):
    """Ask in a child for a call, or close or drop its communicator: the parent gets all of it."""
    n, wrong = comm.world_size, []
    for way in ("done", "close", "drop"):
        for size in (100, 500_000):
            twin, x = comm.dup(), np.ones(size)
            twin.all_reduce(x)
            comm.barrier()
            if comm.rank == 0:
                work = twin.all_reduce(x, async_op=True)
                time.sleep(0.2)  # what the others send has come meanwhile
                child = os.fork()
                if not child:
                    signal.alarm(20)
                    if way == "done":
                        caught(work.done)
                    elif way == "close":
                        caught(twin.close)
                    twin = work = None
                    gc.collect()
                    os._exit(0)
                wrong += [] if os.waitpid(child, 0)[1] == 0 else [f"{way}: the end of the child"]
            else:
                work = twin.all_reduce(x, async_op=True, timeout=15)
            name, text = caught(work.wait)
            sound = name == "nothing" and (work.wait() == n).all()
            wrong += [] if sound else [f"{way}, {size}: {name} {text}"]
            twin.close()
    return wrong


def checks_behind(comm):
    """Check the communicator while calls are in the background."""
    wrong = []
    for _ in range(20):
        works = [comm.all_reduce(np.ones(5_000), async_op=True) for _ in range(3)]
        name, text = caught(comm.check)
        wrong += [] if name == "nothing" else [text]
        wrong += [] if all((w.wait() == comm.world_size).all() for w in works) else ["a call"]
    return wrong


def works(comm):
    """Wait for a call in the background, for some time, and with what is no time."""
    wrong = []
    if comm.rank:
        time.sleep(0.5)
    work = comm.all_reduce(np.ones(20_000), async_op=True)
    wrong += [] if isinstance(work, pycoll.Work) else [type(work).__name__]
    for bad in ("x", -1, float("nan")):
        name = caught(lambda bad=bad: work.wait(bad))[0]
        wrong += [] if name == "ArgumentError" else [f"{bad}: {name}"]
    wrong += [] if (work.wait(np.float32(30)) == comm.world_size).all() else ["the result"]
    wrong += [] if work.done() and (work.wait(1e12) == comm.world_size).all() else ["again"]
    return wrong


def late(comm):
    """Let a call in the background time out: its own error says so."""
    twin, wrong = comm.dup(), []
    if comm.rank < comm.world_size - 1:
        work = twin.all_reduce(np.ones(20_000), async_op=True, timeout=0.5)
        name, text = caught(work.wait)
        wrong += [] if (name, "gave up" in text) == ("CollTimeout", True) else [f"{name}: {text}"]
    comm.barrier()
    twin.close()
    return wrong


def leaves_behind(comm):
    """Leave by an exception while a call is in the background: soon, and everybody hears why."""
    twin, wrong = comm.dup(), []
    start = time.monotonic()
    try:
        with twin:
            if comm.rank == 0:
                twin.all_reduce(np.ones(20_000), async_op=True)
                raise ValueError("no more data")
            time.sleep(0.2)
            twin.all_reduce(np.ones(20_000))
            twin.all_reduce(np.ones(20_000))
    except ValueError:
        pass
    except pycoll.PeerLeft as error:
        wrong += [] if "no more data" in str(error) else [str(error)]
    wrong += [] if time.monotonic() - start < 5 else [f"{time.monotonic() - start:.1f} s"]
    comm.barrier()
    return wrong


def dropped(comm):
    """Drop communicators that had calls in the background: they are closed, also as garbage."""
    wrong, before = [], threading.active_count()
    gc.disable()
    try:
        for _ in range(10):
            group = comm.dup()
            group.all_reduce(np.ones(1000), async_op=True).wait()
            del group
        if threading.active_count() > before + 1:
            wrong.append(f"{threading.active_count() - before} threads more")
        for _ in range(10):
            cycle = [comm.dup()]
            cycle.append(cycle)
            cycle[0].all_reduce(np.ones(1000), async_op=True).wait()
            del cycle
            gc.collect()
    finally:
        gc.enable()
    return wrong


def refused_close(comm):
    """Close in one thread during a call in another: refused, and the call goes on."""
    n, names = comm.world_size, []
    comm.barrier()
    if comm.rank == 0:
        thread = threading.Timer(0.2, lambda: names.append(caught(comm.close)[0]))
        thread.start()
        found = comm.all_reduce(np.ones(9))
        thread.join()
    else:
        time.sleep(0.5)
        found = comm.all_reduce(np.ones(9))
    wrong = [] if names in ([], ["ConcurrentUseError"]) else names
    return wrong + ([] if (found == n).all() else [found[:3].tolist()])


def interrupted_receive(comm):
    """Interrupt a receive: everybody hears of it, on the same host too."""
    twin = comm.dup()
    start = time.monotonic()
    if comm.rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        name, text = caught(lambda: twin.recv(np.empty(3), 1))
    else:
        name, text = caught(lambda: twin.all_reduce(np.ones(3)))
    took = time.monotonic() - start
    comm.barrier()
    twin.close()
    sound = name == ("Revoked" if comm.rank else "KeyboardInterrupt") and took < 5
    sound = sound and (comm.rank == 0 or "rank 0 was interrupted" in text)
    return [] if sound else [f"{name} after {took:.1f} s: {text}"]


def interrupted_waits(comm):
    """Interrupt what waits for a call in the background: everybody hears of it."""
    wrong = []
    for way in ("wait", "next", "check"):
        twin = comm.dup()
        start = time.monotonic()
        if comm.rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            work = twin.all_reduce(np.ones(20_000), async_op=True)
            name, _ = caught({"wait": work.wait, "next": twin.barrier, "check": twin.check}[way])
            wrong += [] if caught(work.wait)[0] == "Revoked" else [f"{way}: the call itself"]
        else:
            name, text = caught(lambda twin=twin: twin.recv(np.empty(3), 0))
            wrong += [] if "interrupted" in text else [f"{way}: {text}"]
        took = time.monotonic() - start
        comm.barrier()
        twin.close()
        sound = name == ("Revoked" if comm.rank else "KeyboardInterrupt") and took < 5
        wrong += [] if sound else [f"{way}: {name} after {took:.1f} s"]
    return wrong


def interrupted_close(comm):
    """Interrupt a close that waits for a call in the background: calls can still be made."""
    twin, wrong = comm.dup(), []
    if comm.rank == 0:
        work = twin.all_reduce(np.ones(20_000), async_op=True)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        wrong += [] if caught(twin.close)[0] == "KeyboardInterrupt" else ["no interrupt"]
        other = twin.all_reduce(np.ones(20_000), async_op=True)
        both = [other.wait(10), work.wait(10)]
    else:
        time.sleep(0.6)
        both = [twin.all_reduce(np.ones(20_000)) for _ in range(2)]
    wrong += [] if all((x == comm.world_size).all() for x in both) else ["the sums"]
    twin.close()
    return wrong


WHEREVER = (
    refused_behind,
    forks,
    forks_under_way,
    forks_asking,
    checks_behind,
    works,
    late,
    leaves_behind,
    interrupted_receive,
    interrupted_waits,
    dropped,
)
ALL = (*WHEREVER, second_threads, refused_close, interrupted_close)
