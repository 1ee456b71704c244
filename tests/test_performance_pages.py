"""The figures on the pages are those of benchmarks/results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks/performance.py"


def test_the_pages_say_what_the_results_say():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_page_with_another_figure_is_noticed(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import performance

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert performance.filled(text.replace("| 5 of 288", "| 4 of 288")) == text != ""
    assert "| 5 of 288" in text
