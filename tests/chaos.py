"""A soak: random collectives, sizes and faults for as long as you like. Not collected by pytest.

``python tests/chaos.py --minutes 10 [--seed 1]``. Every round starts a world of random size, runs
random correct calls against the oracle, and ends with a random fault or none. It stops at the first
surprise and prints the seed that repeats it.
"""

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import numpy as np  # noqa: E402

import cases  # noqa: E402
import oracle  # noqa: E402
from faults import BOUND_S, Event  # noqa: E402
from pycoll import errors  # noqa: E402
from pycoll.algorithms import ALGORITHMS  # noqa: E402
from pycoll.config import Config  # noqa: E402
from pycoll.testing import RankFailed, run_processes  # noqa: E402

FAULTS = [
    "none",
    "kill",
    "exit",
    "raise",
    "close",
    "interrupt",
    "stop",
    "mismatch",
    "refuse",
    "abort",
]
EXPECTED = {
    "kill": errors.PeerLost,
    "exit": errors.PeerLost,
    "raise": errors.PeerLeft,
    "close": errors.PeerLeft,
    "interrupt": errors.Revoked,
    "stop": errors.CollTimeout,
    "mismatch": errors.MismatchError,
    "abort": errors.Revoked,
}


def random_case(rng, n):
    """Return a call that is right on all ranks."""
    collective = rng.choice(cases.REDUCING + cases.MOVING)
    name = rng.choice(oracle.DTYPES)
    count = rng.choice([0, 1, n, rng.randrange(200), rng.randrange(5000), rng.randrange(200_000)])
    memory = ["new", "out", "misaligned", "symmetric", "symmetric_misaligned"]
    memory += ["in_place", "symmetric_in_place"] * (collective in cases.IN_PLACE)
    options = {"root": rng.randrange(n)} if collective in cases.ROOTED else {}
    order, data = "tree", oracle.random
    if collective in cases.REDUCING:
        options["op"] = rng.choice(oracle.ops(name))
        order = rng.choice(["tree", "rank", "any"])
    asked = {"order": order} if collective in cases.REDUCING else {}
    able = [a for a in ALGORITHMS if a.collective == collective and a.worlds(n)]
    if rng.random() < 0.5:
        entry = rng.choice(able)
        asked, order = {"algorithm": entry.name}, "any"
    if order == "any":
        data, order = oracle.exact, "tree"
    place = rng.choice(memory)
    case = cases.make(collective, name, n, count, data=data, memory=place, order=order, **options)
    case.options |= asked
    return case


class Fault:
    """What happens to one rank, and when; the time is in memory that all ranks see."""

    bound_s = BOUND_S  # for others to hear of it
    limit_s = 0.3  # of their calls, if the victim is stopped

    def __init__(self, rng, n, kinds=FAULTS, event=None):
        self.kind = rng.choice(kinds) if n > 1 else "none"
        self.victim, self.delay = rng.randrange(n), rng.random() * 0.03
        self.large = rng.random() < 0.5
        self.messages = self.kind != "mismatch" and rng.random() < 0.3
        self._event = event or Event()

    def strike(self, comm):
        """Do it, on the victim; what the victim raises is not of interest."""
        time.sleep(self.delay)
        self._event.happens()
        pid = os.getpid()
        if self.kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif self.kind == "exit":
            os._exit(7)
        elif self.kind == "raise":
            comm.__exit__(RuntimeError, RuntimeError("chaos"), None)
        elif self.kind == "close":
            comm.close()
        elif self.kind == "interrupt":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.01, os.kill, (pid, signal.SIGINT)).start()
            try:
                comm.recv(np.empty(1), comm.rank)
            except KeyboardInterrupt:
                self._event.happens()
        elif self.kind == "stop":
            if os.fork() == 0:
                time.sleep(self.limit_s + 1.2)
                os.kill(pid, signal.SIGCONT)
                os._exit(0)
            os.kill(pid, signal.SIGSTOP)
        elif self.kind == "mismatch":
            _expect(errors.MismatchError, lambda: comm.broadcast(np.ones(77, np.int16)))
        elif self.kind == "abort":
            comm.abort("chaos")

    def suffer(self, comm):
        """Call until the error comes, on the others; check its type and that it came soon."""
        x = np.ones(100_000 if self.large else 3000, np.float32)
        limit = self.limit_s if self.kind == "stop" else None
        if self.messages:  # who waits for the victim may end the job, or leave, before others hear
            error = EXPECTED[self.kind], errors.Revoked, errors.PeerLeft
            _expect(error, lambda: _forever(lambda x, timeout: around(comm, x, timeout), x, limit))
        else:
            call = comm.broadcast if self.large else comm.all_reduce
            _expect(EXPECTED[self.kind], lambda: _forever(call, x, limit))
        age = self._event.age()
        assert age < self.bound_s + (limit or 0), f"{self.kind}: heard of after {age:.3f} s"

    def refuse(self, comm):
        """Refuse a call on one rank; everybody goes on."""
        if comm.rank == self.victim:
            _expect(errors.ArgumentError, lambda: comm.all_reduce(np.ones(3), "mean"))
        else:
            _expect(errors.PeerRejected, lambda: comm.all_reduce(np.ones(3)))


def _expect(error, call):
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error}")


def _forever(call, x, limit):
    total = call(x, timeout=limit)
    while True:
        assert (call(x, timeout=limit) == total).all()


def around(comm, x, timeout=None):
    """Send an array to the next rank; return what has come from the one before."""
    n, found = comm.world_size, np.empty_like(x)
    comm.send(x, (comm.rank + 1) % n, timeout=timeout)
    comm.recv(found, (comm.rank - 1) % n, timeout=timeout)
    return found


def exchange(comm, sizes):
    """Pass arrays around, each of which is changed as soon as it is sent; return what is wrong."""
    wrong = []
    for size in sizes:
        x = np.full(size, comm.rank, np.uint8)
        found = around(comm, x)
        x[:] = 99
        if not (found == (comm.rank - 1) % comm.world_size).all():
            wrong.append(f"a message of {size} bytes")
    comm.barrier()
    return wrong


def play(comm, todo, sizes, fault):
    """What one rank does in a round; return what went wrong."""
    wrong = cases.run_cases(comm, todo) + exchange(comm, sizes)
    if fault.kind == "refuse":
        fault.refuse(comm)
        return wrong + cases.run_cases(comm, todo)
    if fault.kind != "none":
        (fault.strike if comm.rank == fault.victim else fault.suffer)(comm)
    return wrong


def draw(rng, n):
    """Return the calls of a round and the sizes of its messages."""
    todo = [random_case(rng, n) for _ in range(rng.randrange(1, 30))]
    todo = [case for case in todo for _ in range(rng.choice([1, 1, 5]))]
    return todo, [rng.randrange(10 ** rng.randrange(1, 8)) for _ in range(rng.randrange(8))]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="repeat one round")
    args = parser.parse_args()
    until, seen = time.monotonic() + 60 * args.minutes, Counter()
    seed = args.seed if args.seed is not None else int(time.time()) << 20
    while time.monotonic() < until:
        rng = random.Random(seed)
        n = rng.choice([1, 2, 2, 3, 4, 5, 6])
        todo, sizes = draw(rng, n)
        fault = Fault(rng, n)
        config = Config(10, rng.choice([4096, 65_536, 262_144]), 1 << 28)
        dies = [fault.victim] if fault.kind in ("kill", "exit") else []
        try:
            results = run_processes(n, play, todo, sizes, fault, config=config, may_die=dies)
            wrong = [line for result in results if isinstance(result, list) for line in result]
        except RankFailed as error:
            wrong = [str(error)]
        if wrong:
            sys.exit(f"--seed {seed}: {n} ranks, fault {fault.kind}\n" + "\n".join(wrong))
        seen[fault.kind] += 1
        if args.seed is not None:
            break
        seed += 1
    sys.stdout.write(f"{sum(seen.values())} rounds without a surprise: {dict(seen)}\n")


if __name__ == "__main__":
    main()
