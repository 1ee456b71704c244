"""Communicate while working: ``pycoll run -n 2 examples/overlap.py``.

The same all-reduce and the same work, first one after the other, then with ``async_op=True``. Two
kinds of work: waiting for something outside of this process, as for an accelerator, and computing
on the core that this rank has. Moving data on the host is work for a core, too: with as many ranks
as cores the second kind has little to gain, and with spare cores it gains like the first.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

import pycoll

Work = Callable[[], None]
Times = tuple[float, float]

NBYTES, ROUNDS, COLUMNS = 128 << 20, 7, 56


def device_work(seconds: float) -> None:
    time.sleep(seconds)


def core_work(seconds: float) -> None:
    end, x = time.perf_counter() + seconds, np.ones(4096)
    while time.perf_counter() < end:
        np.sqrt(x, out=x)


def one_after_the_other(comm: pycoll.Communicator, array: np.ndarray, work: Work) -> Times:
    """Return the times since the start at which communication and work ended, and all was done."""
    start = time.perf_counter()
    comm.all_reduce(array, out=array)
    communicated = time.perf_counter() - start
    work()
    return communicated, time.perf_counter() - start


def at_the_same_time(comm: pycoll.Communicator, array: np.ndarray, work: Work) -> Times:
    start = time.perf_counter()
    handle = comm.all_reduce(array, out=array, async_op=True)
    work()
    worked = time.perf_counter() - start
    handle.wait()
    return worked, time.perf_counter() - start


def typical(
    run: Callable[[pycoll.Communicator, np.ndarray, Work], Times],
    comm: pycoll.Communicator,
    array: np.ndarray,
    work: Work,
) -> Times:
    """Return the round of median length out of some, every rank having started together."""
    found = []
    for _ in range(ROUNDS):
        comm.barrier()
        found.append(run(comm, array, work))
    return sorted(found, key=lambda times: times[-1])[ROUNDS // 2]


def bar(start: float, end: float, scale: float, mark: str) -> str:
    left, right = round(start * scale), round(end * scale)
    return f"{' ' * left}{mark * max(1, right - left)}".ljust(COLUMNS)


def show(name: str, alone: float, apart: Times, together: Times) -> None:
    scale = COLUMNS / max(apart[1], together[1])
    saved = (apart[1] - together[1]) / min(alone, apart[1] - apart[0])
    print(f"\n{name}")
    print(f"  blocking   |{bar(0, apart[0], scale, '█')}|")
    print(f"             |{bar(apart[0], apart[1], scale, '░')}| {apart[1] * 1e3:6.2f} ms")
    print(f"  async_op   |{bar(0, min(alone, together[1]), scale, '█')}|")
    print(f"             |{bar(0, together[0], scale, '░')}| {together[1] * 1e3:6.2f} ms")
    hidden = f"{min(saved, 1):.0%}" if saved > 0 else "nothing"  # times vary
    print(f"  {hidden} of the shorter of the two is hidden")


def main() -> None:
    with pycoll.init() as comm:
        array = comm.empty(NBYTES // 4)  # float32
        array[:] = 0
        typical(one_after_the_other, comm, array, lambda: None)
        alone = typical(one_after_the_other, comm, array, lambda: None)[0]
        alone = float(comm.all_reduce(np.array([alone]), "max")[0])
        if comm.rank == 0:
            size = f"all_reduce of {NBYTES >> 20} MiB on {comm.world_size} ranks"
            print(f"{size}: {alone * 1e3:.2f} ms (█)")
        for name, kind in (
            ("work elsewhere (░)", device_work),
            ("work on this core (░)", core_work),
        ):
            work = partial(kind, alone)
            apart = typical(one_after_the_other, comm, array, work)
            together = typical(at_the_same_time, comm, array, work)
            if comm.rank == 0:
                show(name, alone, apart, together)


if __name__ == "__main__":
    main()
