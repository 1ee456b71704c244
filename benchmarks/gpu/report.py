"""From the rows of all stages to results.json, report.md and traffic.png.

    python benchmarks/gpu/report.py FOLDER [MORE ...]

makes them anew in the first folder, of its rows and those of others.
"""

import json
import math
import sys
from collections import Counter
from pathlib import Path

from rows import read

_TITLES = {
    "bits": "the same bits as the engine on the CPU",
    "steps": "optimizer steps and checks, the same bits as on the CPU",
    "training": "data-parallel training, the same bits as of one process",
    "graph": "CUDA graphs, replayed",
    "absent": "a rank does not come: an error, then as new after a reset",
    "abort": "abort while ranks wait",
    "ranks": "processes, the same bits as on the CPU",
    "torch": "a process group of PyTorch, against CPU tensors",
}


def write(folder, more=()):
    """Write everything that can be told from the rows that there are.

    A part that fails is left out and named in the others: the stages have still to run.

    Args:
        folder: Where the rows are, and where the report goes.
        more: Other folders with rows, of other runs.

    Returns:
        Why parts were left out, one line for each.
    """
    rows = [row for place in (folder, *more) for row in read(place / "rows.jsonl")]
    failures = []

    def attempt(part, *arguments):
        try:
            return part(*arguments)
        except Exception as error:  # whatever Matplotlib raises, or a row without a key
            failures.append(f"{part.__name__.strip('_')}: {type(error).__name__}: {error}")
            return ""

    parts = [
        attempt(part, rows)
        for part in (_head, _stages, _correct, _small, _large, _passes, _others, _tools)
    ]
    attempt(draw, rows, folder / "traffic.png")
    rows += [{"stage": "suite", "name": "report", "ok": False, "error": why} for why in failures]
    parts += [f"**A part of this report could not be made:** `{why}`" for why in failures]
    text = "\n\n".join(part for part in parts if part) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return failures


def _head(rows):
    dates = ", ".join(r["date"] for r in rows if r["name"] == "begin") or "at an unknown time"
    lines = ["# On a CUDA device", "", f"`benchmarks/gpu/run.sh`, {dates}."]
    devices = dict.fromkeys(_device(r) for r in rows if r["name"] == "device")
    lines += devices or ["**No device was found: nothing below has run on one.**"]
    return "\n".join(lines)


def _device(row):
    return (
        f"{row['device']}, {row['multiprocessors']} multiprocessors, driver for CUDA "
        f"{_version(row['driver'])}, runtime {_version(row['runtime'])}, "
        f"CuPy {row['cupy']}, pycoll {row['pycoll']} at {row['commit']}."
    )


def _version(number):
    return f"{number // 1000}.{number % 1000 // 10}"


def _stages(rows):
    stages = [r for r in rows if r["stage"] == "suite" and "status" in r]
    lines = ["| stage | how it ended | s |", "|---|---|---|"]
    skipped = {r["stage"]: r["reason"] for r in rows if r["name"] == "skipped"}
    for r in stages:
        status = f"skipped: {skipped[r['name']]}" if r["name"] in skipped else r["status"]
        lines.append(f"| {r['name']} | {status} | {r.get('seconds', '')} |")
    return "\n".join(lines) if stages else ""


def _correct(rows):
    lines, rows = [], [r for r in rows if r["stage"] != "suite"]  # whose rows have names of stages
    for name, title in _TITLES.items():
        found = [r for r in rows if r["name"] == name]
        stages = sorted({r["stage"] for r in found})
        for stage in stages:
            here = [r for r in found if r["stage"] == stage]
            count = Counter(r["ok"] for r in here)
            lines.append(f"| {stage} | {title} | {count[True]} | {len(here) - count[True]} |")
        bad = [r for r in found if not r["ok"]]
        lines += [f"| | failed: `{json.dumps(r)}` | | |" for r in bad[:5]]
    head = ["| stage | what | right | wrong |", "|---|---|---|---|"]
    return "\n".join(head + lines) if lines else ""


def _small(rows):
    found = [r for r in rows if r["name"] == "small all_reduce"]
    lines = ["| 8 KiB all_reduce | kernel | empty launch | bar | met | call on the host |"]
    lines.append("|---|---|---|---|---|---|")
    for r in found:
        times = [f"{r[k] * 1e6:.1f} us" for k in ("seconds", "empty_seconds", "bar")]
        met, host = _met(r), f"{r['host_seconds'] * 1e6:.1f} us"
        lines.append(f"| {r['n']} ranks, {r['kernel']} | {' | '.join(times)} | {met} | {host} |")
    return "\n".join(lines) if found else ""


def _met(row):
    return {None: "", True: "yes", False: "**no**"}[row["ok"]]


def _large(rows):
    found = [r for r in rows if r["name"] == "all_reduce" and r["stage"] == "speed"]
    copied = max((r["tb_s"] for r in rows if r["name"] == "cudaMemcpyAsync"), default=math.nan)
    lines = [
        f"Shares of what the traffic would take at {copied:.2f} TB/s, bytes read and written, the "
        "speed of the fastest copy. What a step of "
        "the ring or of halving-doubling touches about fits the L2 cache up to 64 MiB, so their "
        "bars are for 256 MiB.",
        "",
        "| algorithm | ranks | bytes | time | of own traffic | of 2·n·S | bar | met | registers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        bar = f"{r['bar']:.0%}" if r["bar"] else ""
        lines.append(
            f"| {r['algorithm']} | {r['n']} | {r['nbytes'] >> 20} MiB | {r['seconds'] * 1e6:.0f} us"
            f" | {r['of_own_traffic']:.0%} | {r['of_least_traffic']:.0%} | {bar} | {_met(r)} | "
            f"{r['registers']}{' (spills)' if r['spilled'] else ''} |"
        )
    return "\n".join(lines) if found else ""


def _passes(rows):
    lines = ["| pass over vectors | bytes | time | speed | of a copy |", "|---|---|---|---|---|"]
    for r in (r for r in rows if r["name"] == "pass"):
        speed = f"{r['nbytes'] / r['seconds'] / 1e9:.0f} GB/s"
        lines.append(
            f"| {r['kernel']} | {r['nbytes'] >> 20} MiB | {r['seconds'] * 1e6:.0f} us | {speed} | "
            f"{r['share']:.0%} |"
        )
    return "\n".join(lines) if len(lines) > 2 else ""


def _others(rows):
    lines = ["| baseline | ranks | bytes | time | |", "|---|---|---|---|---|"]
    for r in rows:
        where = f"{r.get('n')} | {r.get('nbytes', 0) / 2**20:g} MiB"
        if r["name"] == "cudaMemcpyAsync":
            lines.append(
                f"| {r['name']} | {where} | {r['seconds'] * 1e6:.0f} us | {r['tb_s']:.2f} TB/s |"
            )
        elif r["name"] == "cupy sum":
            share = f"{r['share']:.0%} of 2·n·S"
            lines.append(
                f"| CuPy sum and broadcast | {where} | {r['seconds'] * 1e6:.0f} us | {share} |"
            )
        elif r["name"] == "narrow blocks":
            beside = f"by default {r['default_seconds'] * 1e6:.0f} us"
            lines.append(
                f"| two_shot_push, {r['threads']} threads a block | {where} | "
                f"{r['seconds'] * 1e6:.0f} us | {'**wrong**' if r['ok'] is False else beside} |"
            )
        elif r["name"] == "nccl all_reduce":
            lines.append(f"| NCCL processes, {r['algorithm']} | {where} | {_nccl(r)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _nccl(row):
    if not row["ok"]:
        return "| **wrong**"
    if row["seconds"] is None:
        return "| works: ranks on one device, through sockets"
    return f"{row['seconds'] * 1e6:.0f} us | by events, of {row['calls']} calls in a row"


def _tools(rows):
    lines = ["| looked at | found |", "|---|---|"]
    for r in (r for r in rows if r["name"] == "tool"):
        lines.append(f"| {r['what']} | {' '.join(str(r['found']).replace('|', ' ').split())} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def draw(rows, path):
    """Draw the shares of the bounds, a group of bars for each world; nothing without Matplotlib."""
    rows = [r for r in rows if r["name"] == "all_reduce" and r["stage"] == "speed"]
    if not rows:
        return
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    most = max(r["nbytes"] for r in rows)
    rows = [r for r in rows if r["nbytes"] == most]
    worlds = sorted({r["n"] for r in rows})
    names = list(dict.fromkeys(r["algorithm"] for r in rows))
    figure, axes = plt.subplots(figsize=(7, 4))
    for i, name in enumerate(names):
        mine = {r["n"]: r for r in rows if r["algorithm"] == name}
        at = [worlds.index(n) + (i - (len(names) - 1) / 2) * 0.25 for n in mine]
        axes.bar(at, [r["of_own_traffic"] for r in mine.values()], 0.22, label=name)
    axes.axhline(0.85, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(worlds)), [f"{n} ranks" for n in worlds])
    axes.set_ylabel("share of own traffic at the speed of a copy")
    axes.set_title(f"all_reduce of virtual ranks, {most >> 20} MiB each, bytes read and written")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    target, *others = map(Path, sys.argv[1:])
    raise SystemExit("\n".join(write(target, others)))
