"""The programs of the tutorial and of other pages run, and print what the pages say."""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p for part in ("tutorial", "how-to") for p in (ROOT / "docs" / part).glob("*.md"))
PAGES += [
    ROOT / f"docs/{name}.md" for name in ("coming-from", "checkpoints", "elastic", "parallel")
]
BLOCK = re.compile(r'^```(python title="([^"]+)"|console)\n(.*?)^```', re.MULTILINE | re.DOTALL)
SEEN = doctest.OutputChecker()


def run(command, folder):
    """Run a command of a page; return what it prints, the lines of ranks in their order.

    Errors stay as they came: the line of one rank may stand before the traceback of another.
    """
    program, *arguments = shlex.split(command)
    start = {"pycoll": ["-m", "pycoll"], "python": []}[program]
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines, errors = (
        [line.rstrip() for line in part.splitlines()] for part in (done.stdout, done.stderr)
    )
    return "\n".join((sorted(lines) if lines and lines[0].startswith("rank ") else lines) + errors)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_says(page, tmp_path):
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    for _, name, text in found:
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
            continue
        command, _, expected = text.removeprefix("$ ").partition("\n")
        printed = run(command, tmp_path)
        same = SEEN.check_output(expected, printed + "\n" if printed else "", doctest.ELLIPSIS)
        assert same, f"{command} printed\n{printed}\nand not\n{expected}"


def test_the_pages_have_programs():
    assert len([page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]) >= 5
