"""Ranks that run pycoll beside the same by hand, in C++, in the same processes."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def measure(worlds, script, source, *flags, timeout=900):
    """Return what the ranks of a script have found, for each world size in turn.

    Args:
        worlds: World sizes.
        script: Name of the script, here; it is given a file for its JSON and the library.
        source: Name of what it calls, in ``native/``.
        flags: For the compiler.
        timeout: Of one world, in seconds.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        library, out = Path(folder) / "by_hand.so", Path(folder) / "out.json"
        compiler = ["g++", "-O3", "-std=c++20", "-shared", "-fPIC", *flags]
        subprocess.run([*compiler, HERE / "native" / source, "-o", library], check=True)
        for n in worlds:
            command = [sys.executable, "-m", "pycoll", "run", "-n", n, "--timeout", timeout]
            words = map(str, [*command, HERE / script, out, library])
            subprocess.run([*words], check=True, cwd=HERE.parent)
            found[n] = json.loads(out.read_text())
    return found
