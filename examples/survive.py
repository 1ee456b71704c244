"""Ranks die, the others go on: a regression that is trained to its end by whoever is left.

``pycoll run -n 4 --keep-going examples/survive.py``: in step 30 rank 1 kills itself, in step 60 the
last one does. Whoever is left calls `Communicator.shrink`, agrees with the others on the step to go
on from, and shares the rows of the dead.
"""

import os
import signal

import numpy as np
from numpy.typing import NDArray

import pycoll

STEPS, ROWS, RATE = 100, 4096, 0.1
Array = NDArray[np.float64]


def data() -> tuple[Array, Array]:
    """Return inputs ``[ROWS, 3]`` and targets; the same on every rank."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 3))
    return x, x @ np.array([1.0, -2.0, 3.0])


def gradient(comm: pycoll.Communicator, x: Array, y: Array, w: Array) -> Array:
    """Return the gradient of the mean squared error over all rows, each rank doing its share."""
    x, y = x[comm.rank :: comm.world_size], y[comm.rank :: comm.world_size]
    mine: Array = 2 * x.T @ (x @ w - y) / ROWS
    return comm.all_reduce(mine)


def agree(comm: pycoll.Communicator, history: list[Array]) -> None:
    """Drop what not every rank has: one may have finished a step in which another one failed."""
    steps = int(comm.all_reduce(np.array(len(history)), "min"))
    del history[steps:]


def main() -> None:
    """Train."""
    comm = pycoll.init()
    name, victims, fresh = comm.rank, {30: 1, 60: comm.world_size - 1}, False
    x, y = data()
    history = [np.zeros(3)]  # the weights before each step; the last two would be enough
    while len(history) <= STEPS:
        if victims.get(len(history)) == name and comm.world_size > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if fresh:
                agree(comm, history)
                fresh = False
            history.append(history[-1] - RATE * gradient(comm, x, y, history[-1]))
        except pycoll.PeerLost as error:
            print(f"rank {name}: {str(error).splitlines()[0]}", flush=True)
            comm, fresh = comm.shrink(), True
            print(f"rank {name} goes on as rank {comm.rank} of {comm.world_size}", flush=True)
    if comm.rank == 0:
        print(f"{comm.world_size} ranks are left, weights {history[-1].round(3)}")
    comm.close()


if __name__ == "__main__":
    main()
