"""What a measurement is worth anything for: the processor and the software that it was taken on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from pycoll import _C
from pycoll.config import VERSION

_CPUS = Path("/sys/devices/system/cpu")


def fingerprint() -> dict[str, Any]:
    """Return what has to be the same for a table of measured times to be used, ready for JSON."""
    return {
        "cpu": cpu_name(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "caches": caches(),
        "folds": _C.fold_isa(),
        "pycoll": VERSION,
    }


def cpu_name() -> str:
    """Return the model of the processor, or its architecture where the system hides it."""
    found = re.search(r"^model name\s*:\s*(.+)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    return " ".join(found[1].split()) if found else platform.machine()


def caches() -> dict[str, int]:
    """Return the sizes in bytes of the data caches of the first core, by level."""
    found = {}
    for index in sorted((_CPUS / "cpu0/cache").glob("index*")):
        size = re.fullmatch(r"(\d+)K", read_text(index / "size"))
        if size and read_text(index / "type") != "Instruction":
            found[f"L{read_text(index / 'level')}"] = int(size[1]) << 10
    return found


def read_text(path: str | Path) -> str:
    """Return what a file of the system says, or nothing where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
