"""Measure how much faster two ranks train than one, each with one core: the GPT and the spirals.

``python benchmarks/scaling.py`` takes some minutes on two idle cores. Contestants run in turn, in
rounds; a round in which other processes used the cores is repeated, and the least disturbed one
counts. It prints a table and writes benchmarks/results/scaling.md and .json.
"""

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from overhead import PATIENCE_S, QUIET, Others

from pycoll.cli.machine import describe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GPT = [str(ROOT / "examples" / "train_gpt.py"), *"--steps 40 --every 10 --text-bytes".split()]
GPT += ["2000000"]
SPIRAL = str(ROOT / "examples" / "spiral.py")
BAR = 1.7


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
    """Return what measures two trainings that do not talk beside one: what the cores give."""
    one = tokens_per_second(1)
    with ThreadPoolExecutor() as threads:
        both = sum(threads.map(tokens_per_second, [1, 1]))
    return {"ratio": both / one, "one": one, "two": both, "unit": "tokens/s"}


def gpt(*options):
    """Return what measures the GPT on two ranks beside one."""

    def measure():
        one, two = tokens_per_second(1), tokens_per_second(2, *options)
        return {"ratio": two / one, "one": one, "two": two, "unit": "tokens/s"}

    return measure


def spiral(name):
    """Return what measures one of the parallel programs of the spirals beside the serial one."""

    def measure():
        text = output_of(SPIRAL)
        times = {k.strip(): float(v) for k, v in re.findall(r"^(.{17}) +([\d.]+) s ", text, re.M)}
        return {"ratio": times["serial"] / times[name], "one": times["serial"], "two": times[name]}

    return measure


CASES = {
    "GPT, two that do not talk": strangers,
    "GPT, `dp=2`": gpt("--mesh", "dp=2"),
    "GPT, `dp=2`, ZeRO-1": gpt("--mesh", "dp=2", "--zero", "1"),
    "GPT, `dp=2`, ZeRO-3": gpt("--mesh", "dp=2", "--zero", "3"),
    "GPT, `tp=2`": gpt("--mesh", "tp=2"),
    "GPT, `tp=2`, sequence parallel": gpt("--mesh", "tp=2", "--sequence-parallel"),
    "spirals, all-reduce between processes": spiral("all-reduce"),
    "spirals, parameter server with threads": spiral("parameter server"),
}


def least_disturbed(measure, tries):
    """Measure until a round was quiet; return the quietest with all ratios."""
    rounds = []
    while len(rounds) < tries and not (rounds and rounds[-1]["others"] <= QUIET):
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            before = Others()
            time.sleep(1.0)
            if before.share() <= QUIET:
                break
        others = Others()
        rounds.append(measure() | {"others": others.share()})
    best = min(rounds, key=lambda found: found["others"])
    return best | {"ratios": [round(found["ratio"], 3) for found in rounds]}


def show(found):
    tokens = "unit" in found
    one, two = (f"{found[k]:,.0f}" if tokens else f"{found[k]:.2f} s" for k in ("one", "two"))
    return f"{found['ratio']:.2f} x | {one} | {two}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases whose name has it")
    parser.add_argument("--tries", type=int, default=3, help="for a round that is disturbed")
    args = parser.parse_args()
    head = ["| two ranks beside one | speed | one | two | others |", "|---|---|---|---|---|"]
    print("\n".join(head), flush=True)
    rows = {}
    for name, measure in CASES.items():
        if args.only in name:
            rows[name] = found = least_disturbed(measure, args.tries)
            head.append(f"| {name} | {show(found)} | {found['others']:.0%} |")
            print(head[-1], flush=True)
    if args.only:
        return
    machine, out = describe(), HERE / "results"
    about = (
        f"`python benchmarks/scaling.py`, {time.strftime('%Y-%m-%d')}, {machine['cores']} cores "
        f"of {machine['cpu']}{' (virtual)' if machine['virtual'] else ''}, {platform.system()} "
        f"{machine['kernel']}, pycoll {machine['pycoll']} at {machine['commit'] or 'no commit'}, "
        f"Python {machine['python']}, NumPy {machine['numpy']}; one BLAS thread a rank.\n"
        f"The bar is {BAR} x for `dp=2` and for the spirals. One, two: tokens/s, or seconds. "
        "Two that do not talk, each alone with its data, are the limit of these cores. "
        "Others: the share of the cores that other processes used meanwhile."
    )
    (out / "scaling.md").write_text("\n".join([about, "", *head, ""]), encoding="utf-8")
    document = {"machine": machine, "rows": rows}
    (out / "scaling.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
