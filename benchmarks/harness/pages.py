"""The pages of results: tables, where they were taken, Markdown and JSON."""

import argparse
import json
import os
import resource
import sys
import time

from harness.start import BENCHMARKS
from pycoll.cli.common.machine import describe

RESULTS = BENCHMARKS / "results"


def arguments(text, name=None):
    """Return the parser of a benchmark, from its docstring; with --name if it writes a page."""
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    if name:
        parser.add_argument("--name", default=name, help=f"of the files that are written ({name})")
    return parser


def table(head, rows):
    rows = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [rows[0], "|---" * len(head) + "|", *rows[1:]]


def size(nbytes):
    """Return 8 B, 64 KiB, 1 MiB; nothing for 0."""
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B" if nbytes else ""


def facts():
    """Return command, date and machine, for the JSON of every page."""
    command = " ".join(["python", *sys.argv])
    return {"command": command, "date": time.strftime("%Y-%m-%d"), "machine": describe()}


def where(document, *more):
    """Return in words how, when and on what a result was taken."""
    machine = document["machine"]
    return ", ".join(
        [
            f"`{document['command'].strip()}`",
            document["date"],
            f"{machine['cores']} cores of {machine['cpu']}{' (virtual)' * machine['virtual']}",
            f"Linux {machine['kernel']}",
            f"pycoll {machine['pycoll']} at {machine['commit']}",
            f"Python {machine['python']}",
            f"NumPy {machine['numpy']}",
            *more,
        ]
    )


def write(stem, title, about, lines, document=None, **found):
    """Write STEM.md and STEM.json, and print the page.

    Args:
        stem: Path without a suffix, or a name in results.
        title: Of the page.
        about: Sentences that say what was measured, behind those that say how, when and where.
        lines: What follows, in Markdown.
        document: Facts about the measurement; by default those of `facts`.
        found: What was found, for the JSON.
    """
    document = document or facts()
    text = "\n".join([f"# {title}", "", f"{where(document)}. {about}", "", *lines, ""])
    print(text)
    stem = RESULTS / stem
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    text = json.dumps(document | found, indent=1)
    stem.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(f"written: {stem}.md, .json")


class Others:
    """The share of the cores that other processes, and other guests of the host, have used."""

    def __init__(self):
        self._start = self._now()

    def share(self):
        """Return it, since the object was made."""
        busy, ours, total = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return max(0.0, busy - ours) / max(total, 1e-9)

    def _now(self):
        with open("/proc/stat", encoding="ascii") as lines:
            ticks = [int(text) for text in lines.readline().split()[1:9]]
        total = sum(ticks) / os.sysconf("SC_CLK_TCK")
        idle = (ticks[3] + ticks[4]) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return total - idle, sum(u.ru_utime + u.ru_stime for u in used), total
