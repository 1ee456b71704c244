"""Predicted times beside measured ones, over TCP between hosts made of network namespaces.

    python benchmarks/predictions.py --hosts 2 3 4

Each "host" is a network namespace with a rank, whose link `tc tbf` limits. The constants
of the network are those that `pycoll tune` measures, on two of the ranks in the same run; the
links' speed is what the limit says. All hosts share the cores of one machine: what a message costs
these is measured on all ranks. Every algorithm of a collective then runs at every size, all of them
taking turns. `simulate` predicts each: its rounds, and before them those in which ranks agree that
they make the same call. Printed is by how much predictions are off, and how often the order of two
algorithms is right; algorithms predicted the same count as wrong. Pairs whose order the measurement
itself does not tell are left out and counted: those whose medians differ by less than a tenth, and
those of which one was faster in some turns and the other one in others.

It needs root, iproute2 and util-linux, and says so where it cannot run.
"""

import itertools
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import hosts as namespaces
import numpy as np
from harness import pages

import pycoll
from pycoll.cli.measure.tune_machine import machine_of
from pycoll.runtime.calls.plans import LINK_LIMITS
from pycoll.runtime.selection.select import SelectionRequest, of_collective, parameters
from pycoll.schedule.cost.cost import active, peers_of
from pycoll.schedule.cost.fabric import Fabric
from pycoll.schedule.cost.network import Network
from pycoll.schedule.cost.simulate import Loads, simulate

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
WIRE = 1448 / 1514  # what is left of a link's bytes behind the headers of Ethernet, IP and TCP
SIZES = (*(64 << 3 * i for i in range(7)), 64 << 20)
TURNS, TURN_S = 5, 0.02
REST_S = 0.003  # in which a link's bucket fills
MOST_S = 2.0  # predicted: algorithms that would take longer are left out
PROGRAM = Path(__file__).resolve()
ROOTED = ("broadcast",)  # agreed upon whatever their size
IN_FLIGHT = 4  # segments at a time
CONSTANTS = ("call", "far_alpha", "far_beta", "sigma", "gamma")
PACKET = 1448  # bytes; TCP acknowledges more than one packet at once, which is one more packet


class Cores(NamedTuple):
    """What calls cost the cores that all ranks share, in seconds."""

    call: float  # however few messages
    message: float
    acknowledged: float  # more for a message of several packets
    byte: float


def schedules(collective, n, nbytes):
    """Yield name and schedule of every algorithm that sends messages only."""
    for algorithm in of_collective(collective):
        if algorithm.works_for(n):
            request = SelectionRequest(collective, nbytes, n, algorithm.order, messages=True)
            yield algorithm.name, algorithm.schedule(n, **parameters(algorithm, request))


def messages(schedule):
    """List the chunks of every message."""
    ranks, found = schedule.all_ranks(), []
    for fold in itertools.chain.from_iterable(schedule.rounds(ranks)):
        count = active(fold, len(ranks))
        for _, peer in peers_of(fold, ranks):
            chunks = np.where(peer != ranks, count, 0)
            found += chunks[chunks > 0].tolist()
    return found


def predict(schedule, rooted, nbytes, machine, cores, mbit):
    """Return the predicted seconds of a call, one of many in a row.

    A call whose messages are large, or that has a root, begins with a dissemination. Payload moves
    in segments, of which some are under way at a time: the first takes all rounds, and each further
    one as long as the busiest port needs for it, or its share of the rounds. `tbf` lets
    `namespaces.BURST` bytes pass at once and limits the average: so links are as fast as they were
    measured to be, but a call takes no less than its busiest port does at the limit, and no less
    than the shared cores do for the messages of all ranks.
    """
    n, sent = schedule.n, messages(schedule)
    bw, limit = 1 / machine.far_beta, mbit * 1e6 / 8 * WIRE
    fabric = Fabric(n, bw, machine.far_alpha, gap=machine.sigma, fold=1 / machine.gamma)
    chunk = nbytes / max(1, schedule.chunks)
    eager = max(sent) * chunk <= LINK_LIMITS["eager_bytes"]
    agreeing = (n - 1).bit_length() if rooted or not eager else 0
    count = 1 if eager else math.ceil(chunk / LINK_LIMITS["segment_bytes"])
    loads = Loads()
    first = float(simulate(schedule, nbytes / count, fabric, loads=loads).max())
    busiest = float(np.max(loads.busy))
    rest = (count - 1) * max(busiest, first / min(IN_FLIGHT, count))
    large = sum(chunks * chunk / count > PACKET for chunks in sent)
    work = (n * agreeing + count * len(sent)) * cores.message
    work += count * large * cores.acknowledged + sum(sent) * chunk * cores.byte
    network = agreeing * machine.far_alpha + max(first + rest, count * busiest * bw / limit)
    return max(machine.call + network, cores.call + work)


def call_of(comm, collective, name, nbytes):
    """Return a call of an algorithm."""
    n, count = comm.world_size, max(comm.world_size, nbytes // 4)
    count -= count % n
    x, part = np.ones(count, np.float32), np.ones(count // n, np.float32)
    y, own = np.empty_like(x), np.empty_like(part)
    calls = {
        "all_reduce": lambda: comm.all_reduce(x, out=y, algorithm=name),
        "all_gather": lambda: comm.all_gather(part, out=y, algorithm=name),
        "reduce_scatter": lambda: comm.reduce_scatter(x, out=own, algorithm=name),
        "broadcast": lambda: comm.broadcast(x, algorithm=name),
        "all_to_all": lambda: comm.all_to_all(x, out=y, algorithm=name),
    }
    return calls[collective]


def measure(comm, call):
    """Return the mean seconds of the slowest rank, over a turn."""
    comm.barrier()
    start = time.perf_counter()
    call()
    once = comm.all_reduce(time.perf_counter() - start, "max")
    count = int(min(max(TURN_S / once, 2), 300))
    comm.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return comm.all_reduce((time.perf_counter() - start) / count, "max")


def network_of(comm):
    """Return the constants of the network, measured by two ranks alone."""
    pair, found = comm.split(0 if comm.rank < 2 else None), np.zeros(len(CONSTANTS))
    if pair is not None:
        with pair:
            found[:] = attrgetter(*CONSTANTS)(machine_of(pair))
    return Network(**dict(zip(CONSTANTS, comm.broadcast(found).tolist(), strict=True)))


class Probes:
    """Calls of known numbers of messages, timed now and then; what these cost the shared cores.

    With `one_shot` every rank sends its vector to every other, with `two_shot_push` a part of it
    and, later, a part of the sum.
    """

    def __init__(self, comm):
        n, self.comm = comm.world_size, comm
        sizes = {"small": 4 * n, "large": 2 * PACKET, "larger": 12 * PACKET}
        one = {
            which: call_of(comm, "all_reduce", "one_shot", size) for which, size in sizes.items()
        }
        self.calls = {"once": one["small"], "acknowledged": one["large"]}
        self.calls["twice"] = call_of(comm, "all_reduce", "two_shot_push", sizes["small"])
        self.rested = {"few bytes": one["large"], "many bytes": one["larger"]}
        self.took = {name: [] for name in (*self.calls, *self.rested)}
        self.count, self.more = n * (n - 1), sizes["larger"] - sizes["large"]

    def take(self):
        """Time each of them."""
        for name, call in self.calls.items():
            self.took[name].append(measure(self.comm, call))
        for name, call in self.rested.items():
            self.took[name] += [self.alone(call) for _ in range(5)]

    def alone(self, call):
        """Return the seconds of a call that finds links at rest: no limit holds it."""
        self.comm.barrier()
        time.sleep(REST_S)
        self.comm.barrier()
        start = time.perf_counter()
        call()
        return self.comm.all_reduce(time.perf_counter() - start, "max")

    def cores(self):
        """Return what messages cost the cores."""
        took = {name: statistics.median(each) for name, each in self.took.items()}
        message = max(0.0, took["twice"] - took["once"]) / self.count
        acknowledged = max(0.0, took["acknowledged"] - took["once"]) / self.count
        byte = max(0.0, took["many bytes"] - took["few bytes"]) / self.count / self.more
        return Cores(took["once"] - self.count * message, message, acknowledged, byte)


def rank(out, mbit, sizes):
    """Write for every case what is predicted and what was measured."""
    rows = []
    with pycoll.init(timeout=60, tuning="off") as comm:
        n, machine, probes = comm.world_size, network_of(comm), Probes(comm)
        usual = Cores(0.0, machine.far_alpha / n, 0.0, 0.0)
        for collective, nbytes in itertools.product(COLLECTIVES, sizes):
            rooted = collective in ROOTED
            found, made = {}, dict(schedules(collective, n, nbytes))
            for name, schedule in made.items():
                if predict(schedule, rooted, nbytes, machine, usual, mbit) < MOST_S:
                    found[name] = []
            calls = {name: call_of(comm, collective, name, nbytes) for name in found}
            for turn in range(TURNS):
                for name in sorted(calls, reverse=turn % 2):
                    found[name].append(measure(comm, calls[name]))
            probes.take()
            rows += [
                [made[name], rooted, collective, nbytes, name, took] for name, took in found.items()
            ]
        cores = probes.cores()
        if comm.rank == 0:
            constants = {name: getattr(machine, name) for name in CONSTANTS}
            constants |= {f"cores' {name}": value for name, value in cores._asdict().items()}
            table = []
            for schedule, rooted, *case, took in rows:
                predicted = predict(schedule, rooted, case[1], machine, cores, mbit)
                table.append([n, *case, predicted, statistics.median(took), took])
            Path(out).write_text(json.dumps({"rows": table, "machine": constants}))


def pairs(rows):
    """Count what predictions say about the order of two algorithms of one case.

    All took turns, so turn i of the one is beside turn i of the other.
    """
    found = Counter()
    for _, group in itertools.groupby(rows, lambda row: row[:3]):
        for a, b in itertools.combinations(list(group), 2):
            faster = [x < y for x, y in zip(a[6], b[6], strict=True)]
            if len(set(faster)) > 1 or max(a[5], b[5]) <= 1.1 * min(a[5], b[5]):
                found["within noise"] += 1
            elif max(a[4], b[4]) <= 1.01 * min(a[4], b[4]):
                found["same"] += 1
            else:
                found["right" if (a[4] < b[4]) == faster[0] else "wrong"] += 1
    return found


def off(rows):
    """Return by how much predictions are off in the median, as a fraction of the measured time."""
    return statistics.median(abs(row[4] / row[5] - 1) for row in rows)


def main():
    parser = pages.arguments(__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--all", action="store_true", help="print every case")
    parser.add_argument("--save", type=Path, help="a file for every case with its turns, as JSON")
    args = parser.parse_args()
    if reason := namespaces.obstacle():
        raise SystemExit(f"predictions.py: {reason}")
    lines, cases = [], []
    for hosts in args.hosts:
        found = namespaces.run_over_tcp(PROGRAM, [args.mbit, *args.sizes], hosts, 1, args.mbit)
        cases.append(found)
        if args.save:
            args.save.write_text(json.dumps(cases))
        rows = found["rows"]
        told = pairs(rows)
        ordered = told["right"] + told["wrong"] + told["same"]
        by_size = [f"{off([r for r in rows if r[2] == size]):.1%}" for size in args.sizes]
        right = f"{told['right'] / ordered:.1%} of {ordered}" if ordered else "-"
        rest = [str(told[which]) for which in ("same", "within noise")]
        lines.append([str(hosts), str(len(rows)), f"{off(rows):.1%}", *by_size, right, *rest])
        constants = ", ".join(f"{name} {value:.3g}" for name, value in found["machine"].items())
        print(f"{hosts} hosts: {constants}", flush=True)
        for _, collective, nbytes, name, predicted, took, _ in rows if args.all else []:
            case = f"{collective}/{name}, {pages.size(nbytes)}"
            times = f"{predicted * 1e6:10.1f} {took * 1e6:10.1f} us {predicted / took:6.2f}"
            print(f"   {case:40}{times}")
    sizes = map(pages.size, args.sizes)
    head = ["hosts", "cases", "off, median", *sizes, "order right"]
    head += ["of these predicted the same", "within noise"]
    print("\n".join(pages.table(head, lines)))


if __name__ == "__main__":
    if "MASTER_ADDR" in os.environ:
        rank(sys.argv[1], float(sys.argv[2]), [int(word) for word in sys.argv[3:]])
    else:
        main()
