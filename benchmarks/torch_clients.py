"""Run what trainers do on gloo and on pycoll, and write the table in docs/torch.md.

``python benchmarks/torch_clients.py`` takes about five minutes. A line says whether it works, and
how far the numbers of the two backends are apart. DeepSpeed, Lightning and Accelerate are run where
they are installed.
"""

import sys
import time
import warnings
from importlib.metadata import version
from importlib.util import find_spec

import torch
from harness import pages
from harness.start import ROOT

PAGE = ROOT / "docs" / "torch.md"
BEGIN, END = "<!-- clients: begin -->\n", "<!-- clients: end -->\n"
RANKS, TRIES = 2, 4
PACKAGES = ("lightning", "accelerate", "deepspeed")

sys.path.insert(0, str(ROOT / "tests"))
warnings.simplefilter("ignore")

from pycoll.testing import RankFailed
from torch_clients.cases import CASES
from torch_clients.trainers import missing
from worlds_torch import run_group


def attempt(case, backend):
    """Return the numbers of all ranks, if any, and a word about it."""
    reasons = []
    for tries in range(1, TRIES + 1):
        try:
            numbers = run_group(RANKS, case, backend=backend, timeout=100, limit_s=90)
        except RankFailed as error:
            text = str(error).split("\nthen rank")[0].strip().splitlines()[-1]
            reasons.append(text.partition(": ")[2] or text)
            continue
        return numbers, "yes" if tries == 1 else f"at try {tries}; before: {reasons[-1]}"
    return None, f"no: {reasons[-1]}"


def compare(theirs, ours):
    """Say how the numbers of two backends agree."""
    if theirs is None or ours is None:
        return ""
    pairs = [(a, b) for x, y in zip(theirs, ours, strict=True) for a, b in zip(x, y, strict=True)]
    if all(a == b for a, b in pairs):
        return "the same bits"
    worst = max(abs(a - b) / max(abs(a), 1e-30) for a, b in pairs)
    return f"within {worst:.0e}"


def line(name, case):
    if reason := missing(name):
        return [name, f"not run: {reason}", f"not run: {reason}", ""]
    (theirs, first), (ours, second) = attempt(case, "gloo"), attempt(case, "pycoll")
    return [name, first, second, compare(theirs, ours)]


def main():
    rows = []
    for name, case in CASES.items():
        rows.append(line(name, case))
        print(" | ".join(rows[-1]), flush=True)
    rows = pages.table(["client", "gloo", "pycoll", "numbers"], rows)
    day = time.strftime("%Y-%m-%d")
    versions = [f"PyTorch {torch.__version__}"]
    versions += [f"{name} {version(name)}" for name in PACKAGES if find_spec(name)]
    head = f"`python benchmarks/torch_clients.py`, {day}, {', '.join(versions)}, 2 ranks:\n\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + head + "\n".join(rows) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
