"""Measure how much faster two ranks train than one, each with one core: the GPT and the spirals.

``python benchmarks/scaling.py`` takes eight minutes. In every round all contestants run in turn,
and each is compared with the single rank of its round; the median of the rounds counts, and the
spread is shown. It prints a table and writes benchmarks/results/scaling.md and .json.
"""

import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from harness import pages
from harness.pages import Others
from harness.start import ROOT

GPT = [str(ROOT / "examples" / "train_gpt.py"), *"--steps 40 --every 10 --text-bytes".split()]
GPT += ["2000000"]
SPIRAL = str(ROOT / "examples" / "spiral.py")
BAR = 1.7
BATCH = 16  # windows of text in a step of the example


def output_of(*command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def tokens_per_second(ranks, *options):
    """Return the median speed of the GPT example, without its first lines."""
    command = [] if ranks == 1 else ["-m", "pycoll", "run", "-n", str(ranks)]
    found = re.findall(r"([\d,]+) tokens/s", output_of(*command, *GPT, *options))
    return statistics.median(float(text.replace(",", "")) for text in found[1:])


def strangers():
    """Two trainings that do not talk, each with the batch of a rank: what the cores give."""
    half = ("--batch", str(BATCH // 2))
    with ThreadPoolExecutor() as threads:
        return sum(threads.map(lambda _: tokens_per_second(1, *half), range(2)))


def gpt(*options):
    return lambda: tokens_per_second(2, *options)


GPTS = {
    "GPT, two that do not talk": strangers,
    "GPT, `dp=2`": gpt("--mesh", "dp=2"),
    "GPT, `dp=2`, ZeRO-1": gpt("--mesh", "dp=2", "--zero", "1"),
    "GPT, `dp=2`, ZeRO-3": gpt("--mesh", "dp=2", "--zero", "3"),
    "GPT, `tp=2`": gpt("--mesh", "tp=2"),
    "GPT, `tp=2`, sequence parallel": gpt("--mesh", "tp=2", "--sequence-parallel"),
}
SPIRALS = {
    "spirals, all-reduce between processes": "all-reduce",
    "spirals, parameter server with threads": "parameter server",
}


def gpt_round():
    """Run every contestant of the GPT, between two runs of a single rank."""
    before = tokens_per_second(1)
    speeds = {name: measure() for name, measure in GPTS.items()}
    one = (before + tokens_per_second(1)) / 2
    return {name: {"ratio": two / one, "one": one, "two": two} for name, two in speeds.items()}


def spirals_round():
    """Run the three programs of the spirals."""
    text = output_of(SPIRAL)
    times = {k.strip(): float(v) for k, v in re.findall(r"^(.{17}) +([\d.]+) s ", text, re.M)}
    one = times["serial"]
    return {
        name: {"ratio": one / times[key], "one": one, "two": times[key]}
        for name, key in SPIRALS.items()
    }


def row(name, rounds):
    ratios = [found["ratio"] for found in rounds]
    one, two = (statistics.median(found[k] for found in rounds) for k in ("one", "two"))
    texts = [f"{t:,.0f}" if name in GPTS else f"{t:.2f} s" for t in (one, two)]
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    return [name, f"{statistics.median(ratios):.2f} x", spread, *texts]


def main():
    parser = pages.arguments(__doc__, "scaling")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds, others = [], Others()
    for i in range(args.rounds):
        rounds.append(gpt_round() | spirals_round())
        ratios = ", ".join(f"{found['ratio']:.2f}" for found in rounds[-1].values())
        print(f"round {i + 1} of {args.rounds}: {ratios}", flush=True)
    share = others.share()
    lines = [row(name, [found[name] for found in rounds]) for name in rounds[0]]
    about = (
        f"One BLAS thread a rank. The bar is {BAR} x for `dp=2` and for the spirals. One, two: "
        "tokens/s, or seconds; the ratio is taken in every round. Two that do not talk, each with "
        "half of the batch, show what these cores give to two ranks at all. "
        f"Other processes used {share:.0%} of the cores."
    )
    lines = pages.table(["two ranks beside one", "median", "spread", "one", "two"], lines)
    pages.write(args.name, "Two ranks beside one", about, lines, others=share, rounds=rounds)


if __name__ == "__main__":
    main()
