"""What a measurement was taken on: processor, cores, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import pycoll
from pycoll import _C
from pycoll.runtime.selection.tuning_table import caches, cpu_name, read_text

_CPUS = Path("/sys/devices/system/cpu")
_DEFAULT_CACHE_BYTES = 32 << 20


def describe() -> dict[str, Any]:
    """Return facts about this machine and this installation, ready for JSON."""
    return {
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache_bytes": last_level_cache(),
        "governor": read_text(_CPUS / "cpu0/cpufreq/scaling_governor") or None,
        "virtual": "hypervisor" in read_text("/proc/cpuinfo"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pycoll": pycoll.__version__,
        "commit": commit(),
        "folds": _C.fold_isa(),
    }


def last_level_cache() -> int:
    """Return the size in bytes of the largest cache, or 32 MiB where the system does not tell."""
    return max(caches().values(), default=_DEFAULT_CACHE_BYTES)


def commit() -> str | None:
    """Return the commit of the sources, with ``+`` when they were changed since; None elsewhere."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 10}
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], **options)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], **options)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + "+" * bool(changes.stdout.strip())
