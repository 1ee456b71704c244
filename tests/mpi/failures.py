"""Programs that provoke failures over MPI; each on a duplicate of the communicator."""

import contextlib
import os
import re
import signal
import threading
import time
import zlib

import numpy as np

import pycoll
from communicator.failures.test_mismatch import KINDS, places
from pycoll.runtime.calls import plans
from pycoll.runtime.calls.descriptors import CUSTOM

BOUND_S = 5.0  # for what needs no deadline; the machine may be busy
X = np.ones(4)
WHOLE = np.ones(4, np.int64)  # in two levels wherever ranks are


def same_everywhere(comm, text):
    """Whether all ranks have the same text."""
    codes = comm.all_gather(np.array([zlib.crc32(text.encode())]))
    return len(set(codes.tolist())) == 1


def mismatches(comm):
    """Let the last rank make another call than the rest, in every way there is."""
    n, me = comm.world_size, comm.rank
    wrong = []
    whole = type(comm._session).__name__ != "TwoLevelSession"  # else those on one host are named
    for name, (field, usual, other) in KINDS.items():
        if name.startswith("memory"):
            continue  # no rank reaches another's memory here, so it makes no difference
        twin = comm.dup()
        twin.all_reduce(X)
        comm.barrier()  # nobody is in that call when others fail in the next
        start, text = time.monotonic(), "nothing was raised"
        try:
            (other if me == n - 1 else usual)(twin)
        except pycoll.MismatchError as error:
            text = str(error)
        except pycoll.CollError as error:
            text = repr(error)
        if f"field '{field}' differs" not in text or time.monotonic() - start > BOUND_S:
            wrong.append(f"{name}: {text}")
        elif whole and n > 2 and f"rank {n - 1} differs from the others" not in text:
            wrong.append(f"{name}: blames the wrong rank: {text}")
        for rank in range(n if whole else 0):
            call = other if rank == n - 1 else usual
            if not re.search(f"rank {rank}: .*{places(call)}", text):
                wrong.append(f"{name}: no call site of rank {rank}: {text}")
        if not same_everywhere(comm, text):
            wrong.append(f"{name}: ranks differ; here {text}")
        try:
            twin.barrier()
            wrong.append(f"{name}: usable after a mismatch")
        except pycoll.MismatchError as error:
            if str(error) != text:
                wrong.append(f"{name}: later {error}")
        twin.close()
    return wrong


def same_numbers(comm):
    """Let the last rank run another algorithm, whose number in the descriptor is the same."""
    usual = plans.algorithm_number
    plans.algorithm_number = lambda *args: usual(*args) >> 16 << 16 | CUSTOM
    try:
        name = "circulant" if comm.rank == comm.world_size - 1 else "ring"
        texts = []
        for count in (1, 100_000):
            with comm.dup() as twin:
                try:
                    texts.append(twin.all_reduce(np.ones(count), algorithm=name, order="any"))
                except pycoll.MismatchError as error:
                    texts.append(str(error))
        wanted = "field 'plans of the algorithm' differs"
        return [str(text) for text in texts if wanted not in str(text)]
    finally:
        plans.algorithm_number = usual


def refusals(comm):
    """Let one rank refuse its arguments; the communicator stays usable."""
    me, results = comm.rank, []
    for bad in range(comm.world_size):
        for x in (X, np.ones(300_000)):
            for call in (comm.all_reduce, comm.broadcast, comm.gather, comm.all_to_all):
                good = np.ones(x.size * comm.world_size)
                try:
                    call("no array" if me == bad else good)
                    results.append("nothing was raised")
                except pycoll.PeerRejected as error:
                    expected = f"rank {bad} refused its arguments"
                    results.append("" if expected in str(error) and me != bad else repr(error))
                except pycoll.ArgumentError as error:
                    results.append("" if me == bad else repr(error))
            results.append("" if comm.all_reduce(np.ones(3))[0] == comm.world_size else "sum")
    return [text for text in results if text]


def timeouts(comm):
    """Let rank 0 stay away: the others name it, and those who wait for it."""
    twin, wrong = comm.dup(), []
    twin.barrier()
    if comm.rank:
        try:
            twin.all_reduce(WHOLE, timeout=0.5)
            wrong.append("nothing was raised")
        except pycoll.CollTimeout as error:
            text = str(error)
            if not re.search(r"gave up after waiting 0\.[45]", text) or "rank 0" not in text:
                wrong.append(text)
            if "waits for rank" not in text or "failures.py" not in text:
                wrong.append(text)
            if re.search(r"rank [1-9]\d*: (does not answer|has not made)", text):
                wrong.append(f"blames ranks that wait: {text}")
    comm.barrier()
    if comm.rank == 0:
        try:
            twin.all_reduce(WHOLE, timeout=5)
            wrong.append("rank 0 heard nothing")
        except pycoll.CollTimeout:
            pass
    twin.close()
    comm.barrier()
    return wrong


def absences(comm):
    """Let rank 1, then the last one, receive instead of calling: nobody says that it is inside."""
    n, wrong = comm.world_size, []
    for away in {1, n - 1}:
        twin = comm.dup()
        twin.all_reduce(WHOLE)
        try:
            if comm.rank == away:
                twin.recv(np.empty(1), (away + 1) % n, timeout=10)
            else:
                twin.all_reduce(WHOLE, timeout=0.5)
            wrong.append("nothing was raised")
        except pycoll.CollTimeout as error:
            if re.search(f"rank {away}: is in", str(error)):
                wrong.append(f"rank {away} was away: {error}")
        comm.barrier()
        twin.close()
        comm.barrier()
    return wrong


def long_reasons(comm):
    """Let a rank refuse, and leave, with more to say than shared memory has room for."""
    wrong, last = [], comm.world_size - 1
    twin, error = comm.dup(), ValueError("\u00e9" * 1000)

    class Array:
        @property
        def __array_interface__(self):
            raise error

    for way in (lambda: twin.all_reduce(Array()), lambda: twin.__exit__(None, error, None)):
        text = "ValueError: "
        try:
            way() if comm.rank == last else twin.all_reduce(X)
        except ValueError:
            pass
        except pycoll.CollError as found:
            text = str(found)
        texts = comm.all_gather_object(text, pickle=True)[:last]
        if f"rank {last}" not in texts[0] or len(set(texts)) > 1:
            wrong.append(f"ranks differ: {texts}")
    return wrong


def late_mates(comm):
    """Let ranks that wait inside their host for a late one hear of a failure on another host."""
    wrong, me, last = [], comm.rank, comm.world_size - 1

    def leave(twin):
        with contextlib.suppress(ValueError), twin:
            raise ValueError("no more data")

    ways = [leave, lambda twin: twin.abort("enough")]
    if comm.hosts.count(comm.hosts[0]) > 1:  # somebody there sees at once that rank 0 differs
        ways.append(lambda twin: twin.barrier())
    for number, way in enumerate(ways):
        twin, text = comm.dup(), ""
        twin.all_reduce(X)
        comm.barrier()
        start = time.monotonic()
        time.sleep(0.2 if me == 0 else 3.0 if me == last else 0.0)
        try:
            way(twin) if me == 0 else twin.all_reduce(X)
        except pycoll.CollError as error:
            text = f"{type(error).__name__}: {error}"
        took = time.monotonic() - start
        found = comm.all_gather_object((text, took), pickle=True)[1:]
        if len({text for text, _ in found}) > 1 or not found[0][0]:
            wrong.append(f"{number}: ranks differ: {found}")
        if max(took for _, took in found[:-1]) > 2:
            wrong.append(f"{number}: late: {found}")
    return wrong


def leaving(comm):
    """Let a rank leave by an exception, close early, and abort; in small and large calls."""
    n, me, wrong = comm.world_size, comm.rank, []
    for size in (4, 400_000):
        for way in ("raise", "close", "abort"):
            twin = comm.dup()
            start = time.monotonic()
            try:
                with twin:
                    if me == n - 1:
                        if way == "raise":
                            raise ValueError("no more data")
                        if way == "abort":
                            twin.abort("enough")
                            twin.barrier()
                    else:
                        twin.all_reduce(np.ones(size))
                    if me < n - 1:
                        wrong.append(f"{way}: nothing was raised")
            except ValueError:
                pass
            except pycoll.PeerLeft as error:
                expected = "ValueError: no more data" if way == "raise" else "it closed"
                if (
                    way == "abort"
                    or expected not in str(error)
                    or f"rank {n - 1}" not in str(error)
                ):
                    wrong.append(f"{way}: {error}")
            except pycoll.Revoked as error:
                if way != "abort" or "enough" not in str(error):
                    wrong.append(f"{way}: {error}")
            if time.monotonic() - start > BOUND_S:
                wrong.append(f"{way}, {size}: {time.monotonic() - start:.1f} s")
            comm.barrier()
    return wrong


def interrupts(comm):
    """Interrupt a rank that waits: its peers' present call raises, or the next if that can end."""
    twin, me = comm.dup(), comm.rank
    outcome = "nothing"
    if me == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        if me < comm.world_size - 1:
            twin.all_reduce(X, timeout=20)
        else:
            time.sleep(1.0)
            twin.all_reduce(X)
        twin.all_reduce(X, timeout=20)
    except KeyboardInterrupt:
        outcome = "interrupted" if me == 0 else "interrupted by mistake"
    except pycoll.Revoked:
        outcome = "revoked" if me else "revoked by mistake"
    twin.close()
    comm.barrier()
    return [] if outcome in ("interrupted", "revoked") else [outcome]


def misuse(comm):
    """Use a closed communicator, and one that another thread is using."""
    twin, wrong = comm.dup(), []
    if comm.rank == 0:
        done = []

        def wait():
            done.append(twin.all_reduce(np.ones(1)))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        try:
            twin.all_reduce(np.ones(1))
            wrong.append("two threads at once")
        except pycoll.ConcurrentUseError:
            pass
        comm.barrier()
        thread.join(20)
        wrong += [] if done else ["the first thread did not finish"]
    else:
        comm.barrier()
        twin.all_reduce(np.ones(1))
    try:
        twin.shrink()
        wrong.append("shrink over MPI")
    except pycoll.ArgumentError:
        twin.barrier()
    twin.close()
    try:
        twin.barrier()
        wrong.append("used after close")
    except pycoll.CommClosed:
        pass
    return wrong


def last_messages(comm):
    """Receive what ranks sent before they closed, small and large, and then notice the end."""
    wrong = []
    for size in (3, 3_000, 30_000, 300_000):
        twin = comm.dup()
        if comm.rank == 0:
            x, senders = np.empty(size), []
            try:
                while True:
                    senders.append(twin.recv(x, timeout=BOUND_S))
                    wrong += [] if (x == senders[-1]).all() else [f"{size}: {x}"]
            except (pycoll.PeerLeft, pycoll.CollTimeout) as error:
                wrong += [] if "all other ranks have closed" in str(error) else [str(error)]
            if sorted(senders) != list(range(1, comm.world_size)):
                wrong.append(f"{size}: from {senders}")
        else:
            twin.send(np.full(size, float(comm.rank)), 0)
        twin.close()
        comm.barrier()
    return wrong


ALL = (
    mismatches,
    same_numbers,
    refusals,
    timeouts,
    absences,
    leaving,
    long_reasons,
    late_mates,
    interrupts,
    misuse,
    last_messages,
)
