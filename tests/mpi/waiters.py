"""Programs in which several threads wait for the same calls; each returns what was wrong."""

import os
import queue
import signal
import sys
import threading
import time

import numpy as np
from later import caught

import pycoll

CALLS, BOUND_S = 1500, 30.0


def waiting_threads(comm):
    """Make calls in one thread while others wait for them, or ask whether they are done."""
    wrong, made = [], queue.SimpleQueue()
    counts = threading.Semaphore(20)  # of calls that nobody has waited for

    def wait(asks):
        while (entry := made.get()) is not None:
            stamp, work = entry
            until = time.monotonic() + BOUND_S
            while asks and not work.done() and time.monotonic() < until:
                pass
            try:
                total = work.wait(BOUND_S)
                right = (total == stamp * comm.world_size).all()
                wrong.extend([] if right else [f"{stamp}: {total}"])
            except pycoll.CollError as error:
                wrong.append(f"{stamp}: {error!r}")
            counts.release()

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    threads = [threading.Thread(target=wait, args=(asks,), daemon=True) for asks in (False, True)]
    for thread in threads:
        thread.start()
    for stamp in range(CALLS):
        if not counts.acquire(timeout=BOUND_S) or wrong:
            break
        x = np.full(8 if stamp % 10 else 20_000, float(stamp))
        made.put((stamp, comm.all_reduce(x, async_op=True)))
    for _ in threads:
        made.put(None)
    for thread in threads:
        thread.join(BOUND_S)
        wrong += ["a thread has not ended"] if thread.is_alive() else []
    sys.setswitchinterval(usual)
    return wrong[:3]


def asking_handler(comm):
    """Let a signal handler bring the call to its end that it interrupts a wait for, and raise."""
    twin, wrong = comm.dup(), []
    twin.barrier()
    if comm.rank:
        time.sleep(0.6)
        name, text = caught(lambda: twin.all_reduce(np.ones(20_000), timeout=15))
        wrong += [] if name in ("nothing", "Revoked") else [f"{name}: {text}"]
    else:
        work = twin.all_reduce(np.ones(20_000), async_op=True)

        def handler(*_):
            until = time.monotonic() + BOUND_S
            while not work.done() and time.monotonic() < until:
                pass
            raise KeyboardInterrupt

        usual = signal.signal(signal.SIGUSR1, handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        name, _ = caught(work.wait)
        signal.signal(signal.SIGUSR1, usual)
        wrong += [] if name == "KeyboardInterrupt" else [f"the wait: {name}"]
        wrong += [] if work.done() and (work.wait() == comm.world_size).all() else ["the call"]
    name, text = caught(lambda: twin.all_reduce(np.ones(3), timeout=15))
    wrong += [] if name == "Revoked" else [f"the next call: {name} {text}"]
    comm.barrier()
    twin.close()
    return wrong


ALL = (waiting_threads, asking_handler)
