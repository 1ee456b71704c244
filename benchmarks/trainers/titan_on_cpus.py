"""torchtitan's training on CPUs, for which it has no device of its own.

``torchrun ... titan_on_cpus.py --job.config_file ...`` takes the arguments of torchtitan. That asks
PyTorch for the default backend of the device; the variable ``BACKEND_NAME`` says which that is. A
text is made of the documentation of pycoll, where torchtitan looks for one.
"""

import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._utils
import torch.distributed as dist

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = Path("tests/assets/c4_test/data.json")


class Cpu:
    """``torch.cpu``, with what torchtitan asks of the module of a device beside."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def get_device_name(self, device=None):
        return "CPU"

    def get_device_properties(self, device=None):
        return SimpleNamespace(
            total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )

    def reset_peak_memory_stats(self, device=None):
        pass

    empty_cache = reset_peak_memory_stats

    def memory_stats(self, device=None):
        return {}


def write_text():
    """Write the text once for all ranks: lines of JSON, as in torchtitan's sources."""
    if int(os.environ["RANK"]) or (TEXT.exists() and TEXT.stat().st_size):
        return
    paragraphs = [p for f in sorted(DOCS.glob("*.md")) for p in f.read_text().split("\n\n")]
    TEXT.parent.mkdir(parents=True, exist_ok=True)
    made = TEXT.with_suffix(".new")
    made.write_text("".join(json.dumps({"text": p}) + "\n" for p in paragraphs if len(p) > 200))
    made.rename(TEXT)


def main():
    write_text()
    dist.Backend.default_device_backend_map["cpu"] = os.environ["BACKEND_NAME"]
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: Cpu()
    runpy.run_module("torchtitan.train", run_name="__main__")


if __name__ == "__main__":
    main()
