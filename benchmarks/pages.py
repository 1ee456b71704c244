"""The pages of results that simple benchmarks write."""

import json
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(RESULTS.parents[1]))

from pycoll.cli.common.machine import describe


def write(name, script, title, about, lines, **found):
    """Write results/NAME.md and .json, and print the page.

    Args:
        name: Of the files.
        script: Which benchmark it is, such as ``"cells.py"``.
        title: Of the page.
        about: Sentences that say what was measured, and how; when and where is said before them.
        lines: What follows, in Markdown.
        found: What was found, for the JSON.
    """
    machine, date = describe(), time.strftime("%Y-%m-%d")
    where = (
        f"`python benchmarks/{script}`, {date}, {machine['cores']} cores of {machine['cpu']}, "
        f"Linux {machine['kernel']}, pycoll at {machine['commit']}."
    )
    text = "\n".join([f"# {title}", "", f"{where} {about}", "", *lines, ""])
    print(text)
    stem = RESULTS / name
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    document = {"date": date, "machine": machine} | found
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
