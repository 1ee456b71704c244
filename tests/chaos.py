"""A soak: random collectives, sizes and faults for as long as you like. Not collected by pytest.

    python tests/chaos.py --minutes 10 [--transport tcp]
    python tests/chaos.py --rounds 2000 --seed 1

Every round starts a world of random size, runs random correct calls against the oracle, and ends
with a random fault or none. It stops at the first surprise and prints the seed that repeats it.
Over TCP the ranks take themselves to be on several hosts. Who waits in vain there asks all ranks
for a second, and those ask others in turn: errors of a rank that is stopped take longer than on one
host.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import numpy as np  # noqa: E402

import cases  # noqa: E402
import oracle  # noqa: E402
from faults import BOUND_S, Event  # noqa: E402
from pycoll import errors  # noqa: E402
from pycoll.algorithms import ALGORITHMS  # noqa: E402
from pycoll.comm import Communicator  # noqa: E402
from pycoll.config import STRICT, Config  # noqa: E402
from pycoll.runtime.startup import tcp_job  # noqa: E402
from pycoll.runtime.startup.bootstrap import Place  # noqa: E402
from pycoll.runtime.startup.hosts import Card, own_network  # noqa: E402
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
    "kill": (errors.PeerLost,),
    "exit": (errors.PeerLost,),
    "raise": (errors.PeerLeft,),
    "close": (errors.PeerLeft,),
    "interrupt": (errors.Revoked, errors.PeerLeft),  # the latter outside of calls
    "stop": (errors.CollTimeout,),
    "mismatch": (errors.MismatchError,),
    "abort": (errors.Revoked,),
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
        self.rooted = rng.random() < 0.5
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
            try:
                threading.Timer(0.01, os.kill, (pid, signal.SIGINT)).start()
                comm.recv(np.empty(1), comm.rank)
            except KeyboardInterrupt as error:  # on a busy machine maybe before the call
                self._event.happens()
                comm.__exit__(type(error), error, None)
        elif self.kind == "stop":
            if os.fork() == 0:
                time.sleep(self.limit_s + 1.2)
                os.kill(pid, signal.SIGCONT)
                os._exit(0)
            os.kill(pid, signal.SIGSTOP)
        elif self.kind == "mismatch":
            odd = np.ones(77, np.int16)  # which a root may leave early
            _expect(errors.MismatchError, lambda: (comm.broadcast(odd), comm.barrier()))
        elif self.kind == "abort":
            comm.abort("chaos")

    def suffer(self, comm):
        """Call until the error comes, on the others; check its type and that it came soon."""
        x = np.ones(100_000 if self.large else 3000, np.float32)
        limit = self.limit_s if self.kind == "stop" else None
        if self.messages:  # who waits for the victim may end the job, or leave, before others hear
            error = (*EXPECTED[self.kind], errors.Revoked, errors.PeerLeft)
            _expect(error, lambda: _forever(lambda x, timeout: around(comm, x, timeout), x, limit))
        else:
            call = comm.broadcast if self.large or self.rooted else comm.all_reduce
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


def hosts_of(rng, n):
    """Return a number of a host for each of two ranks or more: one each, or two in all."""
    two = sorted([0, 1, *(rng.randrange(2) for _ in range(n - 2))])
    return rng.choice([list(range(n)), two])


class Meeting:
    """How ranks of a communicator that share memory meet to connect over TCP."""

    def __init__(self, comm):
        self._comm, self.pids = comm, {}

    def exchange(self, topic, value):
        mine = json.dumps([topic, value]).encode().ljust(4096)
        rows = self._comm.all_gather(np.frombuffer(mine, np.uint8))
        found = [json.loads(row.tobytes()) for row in rows.reshape(-1, len(mine))]
        assert {there for there, _ in found} == {topic}
        return [value for _, value in found]


def over_tcp(comm, hosts, config):
    """Return a communicator of the same ranks, as if they were on these hosts; close this one."""
    meeting, rank, n = Meeting(comm), comm.rank, comm.world_size
    own = {**asdict(Card.own()), "host": f"host {hosts[rank]}", "network": own_network()}
    members = meeting.exchange("card", {**own, "word": os.urandom(8).hex()})
    place = Place(rank, n, "localhost", 0)
    session = tcp_job._join(meeting, members, place, config, None, "what only these ranks know")
    comm.barrier()
    comm.close()
    return Communicator(session)


def play_over_tcp(comm, hosts, config, *part):
    """What one rank does in a round over TCP; return what went wrong."""
    with over_tcp(comm, hosts, config) as connected:
        return play(connected, *part)


def play_round(seed, transport, bound_s):
    """Play a round; return its number of ranks and its fault, and what was wrong."""
    rng = random.Random(seed)
    n = rng.choice([1, 2, 2, 3, 4, 5, 6] if transport == "shm" else [2, 2, 3, 4, 5, 6])
    todo, sizes = draw(rng, n)
    fault, limit_s = Fault(rng, n), max(10.0, 3 * (bound_s or 0))
    config = Config(limit_s, rng.choice([4096, 65_536, 262_144]), 1 << 28)
    part, about = (play, todo, sizes, fault), ""
    if transport == "tcp":
        hosts = hosts_of(rng, n)
        config = replace(config, strict=rng.choice(STRICT))
        part = play_over_tcp, hosts, config, *part[1:]
        about = f" on hosts {hosts}, strict={config.strict}"
    if bound_s is not None:
        fault.bound_s, fault.limit_s = bound_s, max(fault.limit_s, bound_s / 10)
    dies = [fault.victim] if fault.kind in ("kill", "exit") else []
    about = f"{n} ranks{about}, fault {fault.kind} of rank {fault.victim}"
    try:
        results = run_processes(n, *part, config=config, may_die=dies, timeout=6 * limit_s)
        wrong = [line for result in results if isinstance(result, list) for line in result]
    except RankFailed as error:
        wrong = [str(error)]
    return fault.kind, about, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, help="play so many instead; one if there is a seed")
    parser.add_argument("--seed", type=int, help="of the first round")
    parser.add_argument("--transport", choices=["shm", "tcp"], default="shm")
    parser.add_argument("--bound", type=float, help="seconds until all have heard, by default 1")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.seed is not None else None)
    first = args.seed if args.seed is not None else int(time.time()) << 20
    until, seen = time.monotonic() + 60 * args.minutes, Counter()
    while (time.monotonic() < until) if rounds is None else (seen.total() < rounds):
        seed = first + seen.total()
        kind, about, wrong = play_round(seed, args.transport, args.bound)
        if wrong:
            sys.exit(f"--seed {seed}: {about}\n" + "\n".join(wrong))
        seen[kind] += 1
        if seen.total() % 100 == 0:
            sys.stderr.write(f"{seen.total()} rounds so far\n")
    sys.stdout.write(f"{seen.total()} rounds without a surprise: {dict(seen)}\n")


if __name__ == "__main__":
    main()
