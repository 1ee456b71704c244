"""Whether every public name of pycoll has a type that all type checkers know: `make lint` runs it.

Names are left out whose bases are in a package that this Python lacks: PyTorch, or torchft.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {"pycoll.torch.": "torch", "pycoll.torch.torchft.": "torchft"}


def without_type():
    """Return how many names there are, and those of which pyright does not know the type."""
    folder = os.path.dirname(sys.executable)
    done = subprocess.run(
        [sys.executable, *"-m pyright --verifytypes pycoll --ignoreexternal --outputjson".split()],
        cwd=ROOT,
        # It looks where the python of PATH finds modules.
        env={**os.environ, "PATH": folder + os.pathsep + os.environ["PATH"], "PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    absent = tuple(name for name, needs in NEEDS.items() if not importlib.util.find_spec(needs))
    public = [s for s in symbols if s["isExported"] and not s["name"].startswith(absent)]
    return len(public), [s["name"] for s in public if not s["isTypeKnown"]]


if __name__ == "__main__":
    n, unknown = without_type()
    sys.stdout.write(
        f"{n - len(unknown)} of {n} public names have a type\n"
        + "".join(f"  {u}\n" for u in unknown)
    )
    sys.exit(bool(unknown) or n < 5000)
