"""Registers and spills of every kernel, from what the assembler said when they were compiled.

    PYTHONPATH=. python tests/support/ptxas_table.py > tests/cuda/registers.json

writes the table from the logs of the newest build of the device library.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import build_cuda

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build/cuda"
_OPS = ["sum", "prod", "min", "max", "avg", "and", "or", "xor"]
_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
_STEPS = ["adamw", "sgd", "momentum", "nesterov"]
_KERNEL = re.compile(r"::(\w+)<.*?(Folder|Copier)<pycoll::cuda::DevicePolicy(.*?)>")
_MULTICAST = re.compile(r"::multicast<.*WithElement<([\w:]+)>")
_PASS = re.compile(
    r"::(step|unscale|nonfinite|squares|norm)<(?:\(pycoll::OptimKind\)(\d), )?([\w:, ]+)>\("
)


def title(symbol):
    """Return "interpret float sum" for the demangled name of a kernel."""
    passes = _PASS.search(symbol)
    if passes:
        kind, step, types = passes.groups()
        words = [kind, *([_STEPS[int(step)]] if step else []), types.replace("pycoll::cuda::", "")]
        return " ".join(words).replace(",", "")
    multicast = _MULTICAST.search(symbol)
    if multicast:
        return f"multicast {multicast[1].split('::')[-1]} sum"
    found = _KERNEL.search(symbol)
    if not found:
        return next(
            (
                name
                for name in ("gate", "message", "moves", "multicast_copies")
                if f"::{name}(" in symbol
            ),
            "empty",
        )
    kind, what, rest = found.groups()
    if what == "Copier":
        return f"{kind} move"
    kind_of_element, op = re.match(r", (.*), \(pycoll::ReduceOp\)(\d)", rest).groups()
    return f"{kind} {kind_of_element.split('::')[-1]} {_OPS[int(op)]}"


def parse(text):
    """Return ``{kernel: {architecture: [registers, spilled bytes]}}``."""
    entries = list(_ENTRY.finditer(text))
    names = "\n".join(entry["name"] for entry in entries)
    done = subprocess.run(["c++filt"], input=names, capture_output=True, text=True, check=True)
    table = {}
    for entry, symbol in zip(entries, done.stdout.splitlines(), strict=True):
        spilled = int(entry["stores"]) + int(entry["loads"])
        table.setdefault(title(symbol), {})[entry["arch"]] = [int(entry["registers"]), spilled]
    return table


def logs():
    """Return what was said about all kernels by the newest build; {} if there was none."""
    table = {}
    for path in sorted(LOGS.glob("kernels_*.cu.o.log")):
        table.update(parse(path.read_text(encoding="utf-8")))
    return table


def main():
    table = {"nvcc": list(build_cuda.release(build_cuda.find_nvcc())), "kernels": logs()}
    rows = [f'    "{name}": {json.dumps(table["kernels"][name])}' for name in sorted(logs())]
    sys.stdout.write(f'{{\n  "nvcc": {json.dumps(table["nvcc"])},\n  "kernels": {{\n')
    sys.stdout.write(",\n".join(rows) + "\n  }\n}\n")


if __name__ == "__main__":
    main()
