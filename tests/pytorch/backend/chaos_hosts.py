"""Faults between hosts: partitions, one-way loss, slow links, frozen hosts, deaths; from a seed.

    python tests/pytorch/backend/chaos_hosts.py [--rounds 50] [--seed 1] [--only cut,freeze]

Needs root. Each round starts 2 or 3 hosts of one or two ranks, connected over TCP. They make calls
while a fault strikes, and every rank keeps a history: what came of each call, and when. The
histories must fit together: each result is right; once a call has failed on one rank, no other
rank gets beyond it; every rank ends in time; every death is told within a second; an error names a
rank that the fault has hit.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import pycoll.torch  # noqa: F401, E402 - registers the backend
from hosts_apart import Hosts, missing  # noqa: E402
from worlds_torch import take_host  # noqa: E402

LIMIT_S = 6.0  # of a call
SLACK_S = 2.0  # for what follows a failure
TOLD_S = 1.0
CALLS = 200
SIZES = (1, 100, 5000, 70_000)
HARMLESS = ("none", "slow", "blink", "doze")
FAULTS = (*HARMLESS, "kill", "crash", "cut", "mute", "deaf", "pair", "freeze")


# --- What a rank does ----------------------------------------------------------------------------


def given(rank, call, count):
    return (torch.arange(count) * (rank + 3) + 7 * call) % 1000


def all_reduce(rank, n, call, count):
    x = given(rank, call, count)
    dist.all_reduce(x)
    return x, sum(given(r, call, count) for r in range(n))


def broadcast(rank, n, call, count):
    x = given(rank, call, count)
    dist.broadcast(x, call % n)
    return x, given(call % n, call, count)


def all_gather(rank, n, call, count):
    out = torch.empty(n * count, dtype=torch.int64)
    dist.all_gather_into_tensor(out, given(rank, call, count))
    return out, torch.cat([given(r, call, count) for r in range(n)])


def reduce_scatter(rank, n, call, count):
    out = torch.empty(count, dtype=torch.int64)
    dist.reduce_scatter_tensor(out, given(rank, call, n * count))
    whole = sum(given(r, call, n * count) for r in range(n))
    return out, whole[rank * count : (rank + 1) * count]


def all_to_all(rank, n, call, count):
    out = torch.empty(n * count, dtype=torch.int64)
    dist.all_to_all_single(out, given(rank, call, n * count))
    parts = [given(r, call, n * count)[rank * count : (rank + 1) * count] for r in range(n)]
    return out, torch.cat(parts)


CALLABLES = (all_reduce, all_reduce, broadcast, all_gather, reduce_scatter, all_to_all)


def take_part(hosts, places, rank, seed, store, out):
    """Run one rank, and write its history, a line for each event."""

    def write(*event):
        os.write(out, json.dumps([rank, time.monotonic(), *event]).encode() + b"\n")

    hosts.enter(places[rank])
    take_host(places[rank])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # PyTorch's own
    rng, n = random.Random(seed), len(places)
    dist.init_process_group(
        "pycoll",
        store=dist.FileStore(store, n),
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=LIMIT_S),
    )
    write("ready")
    failures = 0
    for call in range(CALLS):
        fn, count = rng.choice(CALLABLES), rng.choice(SIZES)
        try:
            found, want = fn(rank, n, call, count)
        except Exception as error:
            write("error", call, str(error))
            failures += 1
            if failures == 2:  # and the call behind it failed as well
                break
            continue
        right = torch.equal(found, want)
        shared = fn in (all_reduce, broadcast, all_gather)
        seen = hashlib.sha1(found.numpy().tobytes()).hexdigest()[:12] if shared else ""
        write("result", call, right, seen)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    write("end")


# --- A round -------------------------------------------------------------------------------------


class Fault:
    """What happens, to which host, and when."""

    def __init__(self, rng, places, only):
        self.kind = rng.choice(only)
        self.delay_s = rng.random() * 0.1
        self.last_s = rng.uniform(0.1, 0.6)
        self.host = rng.choice(sorted(set(places)))
        self.other = rng.choice(sorted(set(places) - {self.host}))
        self.hit = [r for r, host in enumerate(places) if host == self.host]
        if self.kind == "kill":
            self.hit = [rng.choice(self.hit)]
        self.dead = self.hit if self.kind in ("kill", "crash") else []
        self.named = list(self.hit)
        if self.kind == "pair":
            self.named += [r for r, host in enumerate(places) if host == self.other]
        self.harmless = self.kind in HARMLESS
        self._undo = []

    def strike(self, hosts, pids):
        """Let it happen; return when that was done."""
        others = [k for k in range(hosts.n) if k != self.host]
        if self.kind in ("kill", "crash"):
            self._signal(pids, signal.SIGKILL)
        elif self.kind in ("freeze", "doze"):
            self._signal(pids, signal.SIGSTOP)
            self._undo = [lambda: self._signal(pids, signal.SIGCONT)]
        elif self.kind in ("cut", "blink"):
            hosts.cut(self.host)
            self._undo = [lambda: hosts.join(self.host)]
        elif self.kind == "slow":
            hosts.slow(self.host, 200)
            self._undo = [lambda: hosts.fast(self.host)]
        ways = {
            "mute": [(self.host, k) for k in others],
            "deaf": [(k, self.host) for k in others],
            "pair": [(self.host, self.other), (self.other, self.host)],
        }
        for way in ways.get(self.kind, []):
            hosts.lose(*way)
            self._undo.append(lambda way=way: hosts.find(*way))
        return time.monotonic()

    def _signal(self, pids, number):
        for rank in self.hit:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], number)

    def heal(self):
        for undo in self._undo:
            undo()
        self._undo = []


def start(hosts, places, seed, store):
    read_end, write_end = os.pipe()
    pids = []
    for rank in range(len(places)):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.close(read_end)
            try:
                take_part(hosts, places, rank, seed, store, write_end)
            except BaseException as error:
                text = json.dumps([rank, time.monotonic(), "broke", repr(error)])
                os.write(write_end, text.encode() + b"\n")
            os._exit(0)
    os.close(write_end)
    return pids, read_end


def watch(read_end, hosts, fault, pids):
    """Collect the events of all ranks; strike when all are ready, heal when it is time.

    Returns:
        The events, when the fault struck, and whether ranks had to be killed.
    """
    events, data, struck, healed, hung = [], b"", None, False, False
    began, ready_at = time.monotonic(), None
    frozen_s = 2 * LIMIT_S + SLACK_S
    last_s = {"freeze": frozen_s, "blink": fault.last_s, "doze": fault.last_s}.get(fault.kind, 60)
    limit_s = 60 if fault.harmless else frozen_s + LIMIT_S + SLACK_S
    while True:
        now = time.monotonic()
        if ready_at is not None and struck is None and now >= ready_at + fault.delay_s:
            struck = fault.strike(hosts, pids)
        if struck is not None and not healed and now >= struck + last_s:
            fault.heal()
            healed = True
        if now >= began + 15 + limit_s or (struck and now >= struck + limit_s):
            hung = True
            break
        if select.select([read_end], [], [], 0.01)[0]:
            part = os.read(read_end, 1 << 16)
            if not part:
                break
            *lines, data = (data + part).split(b"\n")
            events += [json.loads(line) for line in lines]
            if ready_at is None and sum(e[2] == "ready" for e in events) == len(pids):
                ready_at = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            if hung:
                os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(read_end)
    fault.heal()
    return events, struck, hung


def check(events, struck, hung, fault, n, told):
    """Return what is wrong with the histories; `told` gets how long errors took, by fault."""
    ranks = [r for r in range(n) if r not in fault.dead]
    history = {r: [e[1:] for e in events if e[0] == r] for r in ranks}
    wrong = check_results(events)
    if hung:
        late = [r for r in ranks if not any(e[1] == "end" for e in history[r])]
        wrong.append(f"ranks {late} did not end")
    first = {r: next((e for e in found if e[1] == "error"), None) for r, found in history.items()}
    first = {r: error for r, error in first.items() if error}
    if fault.harmless:
        return wrong + [f"rank {r}: {error[3]}" for r, error in first.items()]
    if struck is None or not first:
        return wrong  # the calls were over before
    at = min(error[2] for error in first.values())
    for r in ranks:
        done = [e[2] for e in history[r] if e[1] == "result"]
        if max(done, default=-1) > at:
            wrong.append(f"rank {r} went beyond call {at}, which has failed elsewhere")
        if r not in first and len(done) < CALLS:
            wrong.append(f"rank {r} has neither an error nor all results")
    return wrong + check_errors(first, struck, fault, told.setdefault(fault.kind, []))


def check_results(events):
    """Each is right, and what all ranks have of a call is the same."""
    wrong, seen = [f"rank {e[0]}: {e[3]}" for e in events if e[2] == "broke"], {}
    for rank, _, _, call, right, shown in (e for e in events if e[2] == "result"):
        if not right:
            wrong.append(f"rank {rank}: wrong result of call {call}")
        if shown and seen.setdefault(call, shown) != shown:
            wrong.append(f"rank {rank} has another result of call {call}")
    return wrong


def check_errors(first, struck, fault, told):
    """Those who live are told in time, and of a rank that the fault has hit."""
    wrong, most = [], TOLD_S if fault.dead else LIMIT_S + SLACK_S
    if fault.kind == "freeze":  # a call in two levels waits twice, and then for what others say
        most = 2 * LIMIT_S + SLACK_S
    for r, (when, _, _, text) in first.items():
        if fault.kind != "freeze" or r not in fault.hit:
            told.append(when - struck)
            if told[-1] > most:
                wrong.append(f"rank {r} was told after {told[-1]:.2f} s: {text}")
        apart = r in fault.named  # for it, it is the others that are gone
        if not apart and not any(f"rank {k}" in text for k in fault.named):
            wrong.append(f"rank {r} blames somebody else than {fault.named}: {text}")
    return wrong


def play(seed, kinds, told):
    """Play the round of a seed; return a line on its fault, what happened, and what went wrong."""
    rng = random.Random(seed)
    shape = [rng.choice([1, 1, 2]) for _ in range(rng.choice([2, 2, 3]))]
    places = [host for host, ranks in enumerate(shape) for _ in range(ranks)]
    fault = Fault(rng, places, kinds)
    with contextlib.closing(Hosts(len(shape))) as hosts, tempfile.TemporaryDirectory() as folder:
        pids, read_end = start(hosts, places, seed, str(Path(folder) / "store"))
        events, struck, hung = watch(read_end, hosts, fault, pids)
    wrong = check(events, struck, hung, fault, len(places), told)
    line = f"--seed {seed}: {fault.kind} of host {fault.host}, ranks on hosts {places}"
    return line, [[e[1] - (struck or e[1]), e[0], *e[2:]] for e in events], wrong


def main(say=print):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--only", default=",".join(FAULTS), help="faults to draw from")
    parser.add_argument("--talk", action="store_true", help="show what happened, by seconds")
    args = parser.parse_args()
    if why := missing():
        sys.exit(why)
    os.environ["PYCOLL_SECRET"] = "only the ranks of this test know it"
    told, bad = {}, 0
    for seed in range(args.seed, args.seed + args.rounds):
        line, events, wrong = play(seed, args.only.split(","), told)
        for event in events if args.talk else []:
            say(*event[:5], flush=True)
        for text in wrong or [""] * args.talk:
            say(f"{line}: {text}", flush=True)
        bad += bool(wrong)
    say(f"{args.rounds} rounds, {bad} of them wrong")
    for kind, times in sorted(told.items()):
        most = max(times, default=0.0)
        say(f"{kind}: {len(times)} ranks were told, the last after {most:.3f} s")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
