"""The figures on the pages are those of benchmarks/results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/performance.py"
CHANGE = """
import re
import performance
for page in ("README.md", "docs/performance.md"):
    text = (performance.ROOT / page).read_text(encoding="utf-8")
    other = re.sub(r"\\d+ of (306|288)", r"999 of \\1", text)
    print(other != text, performance.filled(other) == text)
"""


def test_the_pages_say_what_the_results_say():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_another_figure_is_noticed():
    words = [sys.executable, "-c", CHANGE]
    done = subprocess.run(words, capture_output=True, text=True, cwd=SCRIPT.parent)
    assert done.stdout == "True True\nTrue True\n", done.stderr
