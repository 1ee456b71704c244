"""Random SIGKILLs while an example trains: does it end, with the same bits, how soon?

    python benchmarks/elastic.py --jobs 20 --ranks 4 --zero 2
    python benchmarks/elastic.py --jobs 200 --train-gpt --steps 100 --kills 3

Each job is killed at random moments, a random rank each time; the next one after the ranks have met
again, or with ``--zero 0``, where one rank's state is enough, at any time. It must end well, soon;
its ranks must have the same parameters; with as many ranks as before (``--ranks 4``) these must be
those of a job that nobody killed. Prints the time from a kill to the end of the next step after the
ranks have met again: with ``--ranks 4`` they wait for the process that is started again, with
``--ranks 2..4`` they do not. A job that fails is counted, its output printed; the others go on.
The example is ``examples/elastic.py``, with ``--gpt`` on a tiny GPT; with ``--train-gpt``
``examples/train_gpt.py --elastic`` with a small model. Each job is killed soon after its first
step, and every so often from then on.
"""

import argparse
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAIN_GPT = "train_gpt.py --elastic 4 --batch 16 --length 32 --features 32 --depth 2".split()
TRAIN_GPT += ["--text-bytes", "500000"]
STEP = re.compile(r"step +\d+(/\d+ |:) *loss (\d\S+)")


class Failure(Exception):
    """A job did not end as it should: what it did, and its last lines."""


class Run:
    """One job: what it has printed, with the times, and its ranks."""

    def __init__(self, args, pause):
        words = ["run", "-n", args.ranks, "--elastic", "--restarts", "1000"]
        small = ["elastic.py", "--pause", str(pause), "--every", "1", *["--gpt"] * args.gpt]
        name, *rest = TRAIN_GPT if args.train_gpt else small
        words += [str(ROOT / "examples" / name), *rest]
        words += ["--zero", str(args.zero), "--steps", str(args.steps)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pycoll", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.limit_s, self.begun = args.limit, time.monotonic()
        self.lines, self.errors, self.killed = [], [], []
        self._readers = [
            threading.Thread(target=self._read, args=pair)
            for pair in ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines):
        for line in stream:
            lines.append((time.monotonic(), line.rstrip()))

    def is_stuck(self):
        """Whether nothing was printed for as long as a hang."""
        last = max([t for t, _ in self.lines[-1:] + self.errors[-1:]], default=self.begun)
        return time.monotonic() - max(last, self.begun) > self.limit_s

    def has_begun(self):
        return any(STEP.match(line) for _, line in self.lines)

    def met_again(self):
        """Whether the ranks have taken a step since the last kill."""
        return not self.killed or len(self.delays()) == len(self.killed)

    def kill_one(self, chance):
        pid = self.process.pid
        ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if ranks:
            self.killed.append(time.monotonic())
            os.kill(int(chance.choice(ranks)), signal.SIGKILL)

    def wait(self):
        """Wait for the end; return the digests that ranks have printed."""
        try:
            status = self.process.wait(self.limit_s)
        except subprocess.TimeoutExpired:
            self.give_up("a hang")
        for reader in self._readers:
            reader.join()
        if status:
            self.give_up(f"status {status}")
        return {line.split()[1] for _, line in self.lines if line.startswith("params")}

    def give_up(self, what):
        self.process.kill()
        lines = [line for _, line in sorted(self.lines + self.errors)]
        raise Failure(what, "\n".join(lines[-60:]))

    def loss(self):
        """The loss of the last step."""
        return float([found[2] for _, line in self.lines if (found := STEP.match(line))][-1])

    def delays(self):
        """Seconds from each kill to the end of the first step after the next change."""
        ends = [t for t, line in self.lines if "ranks;" in line]  # printed when it has been taken
        return [min(late) - at for at in self.killed if (late := [t for t in ends if t > at])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--ranks", default="4", help="as for pycoll run -n (4)")
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--pause", type=float, default=0.03, help="s after each step, without --train-gpt"
    )
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between kills (5)")
    parser.add_argument("--kills", type=int, default=1000, help="in a job, at most")
    parser.add_argument("--limit", type=float, default=120.0, help="a hang: s without a line (120)")
    parser.add_argument("--seed", type=int, default=0)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--gpt", action="store_true", help="examples/elastic.py --gpt")
    which.add_argument("--train-gpt", action="store_true", help="examples/train_gpt.py --elastic")
    args = parser.parse_args()
    chance, begun, failures = random.Random(args.seed), time.monotonic(), Counter()
    plain = Run(args, 0.0)
    expected, fixed, delays, kills, apart = plain.wait(), ".." not in args.ranks, [], 0, 0.0
    for job in range(args.jobs):
        run = Run(args, args.pause)
        try:
            torment(run, args, chance)
            found = run.wait()
            if len(found) != 1 or (fixed and found != expected):
                raise Failure("a divergence", f"{found}, expected {expected}")
        except Failure as failure:
            failures[failure.args[0]] += 1
            print(f"job {job}: {failure.args[0]}\n{failure.args[1]}", flush=True)
            continue
        delays += run.delays()
        count = len(run.killed)
        kills += count
        off = abs(run.loss() / plain.loss() - 1)
        apart = max(apart, off)
        print(
            f"job {job}: {len(run.killed)} kills, same parameters, loss off by {off:.2%}",
            flush=True,
        )
    delays.sort()
    print(
        f"{args.jobs} jobs, {kills} kills in {time.monotonic() - begun:.0f} s: "
        f"{dict(failures) or 'no hang, no divergence'}; the last loss is off by {apart:.2%} at "
        f"most{', the bits of a job that nobody killed' if fixed and not failures else ''}"
    )
    if delays:
        middle = delays[len(delays) // 2]
        print(f"from death to the next step: median {middle:.2f} s, largest {delays[-1]:.2f} s")


def torment(run, args, chance):
    """Kill ranks of a job until it ends; the first soon after it has begun."""
    while run.process.poll() is None and not run.has_begun() and not run.is_stuck():
        time.sleep(0.05)
    due = time.monotonic() + chance.uniform(0, min(2.0, 2 * args.every))
    while run.process.poll() is None:
        time.sleep(0.01)
        if run.is_stuck():
            run.give_up("a hang")
        due = due if len(run.killed) < args.kills else math.inf
        if time.monotonic() >= due and (args.zero == 0 or run.met_again()):
            run.kill_one(chance)
            due = time.monotonic() + chance.uniform(0, 2 * args.every)


if __name__ == "__main__":
    main()
