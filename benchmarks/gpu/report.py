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
    "norm bits": "all_reduce + residual + RMSNorm, the same bits as on the CPU",
    "training": "data-parallel training, the same bits as of one process",
    "graph": "CUDA graphs, replayed",
    "absent": "a rank does not come: an error, then as new after a reset",
    "abort": "abort while ranks wait",
    "assumption": "what kernels take for granted",
    "ranks": "processes, the same bits as on the CPU",
    "heap memory": "processes, heaps mapped as they were to be",
    "process moves": "processes, copies and blocks of different sizes, as on the CPU",
    "process messages": "processes, messages from each to the next",
    "traced": "processes in a trace, times of the device where the host's clock has them",
    "ranges": "processes, ranges of NVTX as a profiler hears them",
    "torch": "a process group of PyTorch, against CPU tensors",
}


def write(folder, more=()):
    """Write everything that follows from the rows that there are.

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

    parts = [_head, _stages, _correct, _small, _protocols, _copied, _large, _passes, _norms]
    parts = [attempt(part, rows) for part in (*parts, _others, _tools)]
    attempt(draw, rows, folder / "traffic.png")
    rows += [{"stage": "suite", "name": "report", "ok": False, "error": why} for why in failures]
    parts += [f"**A part of this report could not be made:** `{why}`" for why in failures]
    text = "\n\n".join(part for part in parts if part) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return failures


def head(folder):
    """Return what a reader looks at first: the report without its last table."""
    return (folder / "report.md").read_text(encoding="utf-8").partition("\n| looked at |")[0]


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


def _table(head, rows):
    """Lay rows out under a head such as ``"stage | s"``; nothing where there are none."""
    rows = [f"| {' | '.join(map(str, cells))} |" for cells in rows]
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *rows]) if rows else ""


def _us(seconds, digits=0):
    return f"{seconds * 1e6:.{digits}f} us"


def _named(rows, name, stage=None):
    """Return the rows of a name, and of a stage."""
    return [r for r in rows if r["name"] == name and stage in (None, r["stage"])]


def _stages(rows):
    skipped = {r["stage"]: r["reason"] for r in _named(rows, "skipped")}
    lines = []
    for r in (r for r in rows if r["stage"] == "suite" and "status" in r):
        status = f"skipped: {skipped[r['name']]}" if r["name"] in skipped else r["status"]
        lines.append([r["name"], status, r.get("seconds", "")])
    return _table("stage | how it ended | s", lines)


def _correct(rows):
    lines, rows = [], [r for r in rows if r["stage"] != "suite"]  # whose rows have names of stages
    for name, title in _TITLES.items():
        found = _named(rows, name)
        for stage in sorted({r["stage"] for r in found}):
            count = Counter(bool(r["ok"]) for r in found if r["stage"] == stage)
            lines.append([stage, title, count[True], count[False]])
        bad = [r for r in found if not r["ok"]]
        lines += [["", f"failed: `{json.dumps(r)}`", "", ""] for r in bad[:5]]
    return _table("stage | what | right | wrong", lines)


def _small(rows):
    lines = []
    for r in _named(rows, "small all_reduce"):
        times = [_us(r[k], 1) for k in ("seconds", "empty_seconds", "bar")]
        lines.append([f"{r['n']} ranks, {r['kernel']}", *times, _met(r), _us(r["host_seconds"], 1)])
    return _table("8 KiB all_reduce | kernel | empty launch | bar | met | call on the host", lines)


def _protocols(rows):
    lines, found = [], {}
    for r in _named(rows, "protocol"):
        times = found.setdefault((r["n"], r["nbytes"]), {})
        times[r["threads"]] = _us(r["seconds"], 1) if r["right"] else "**wrong**"
    forms = sorted({threads for times in found.values() for threads in times} - {0})
    for (n, size), times in found.items():
        lines.append([n, size, times.get(0, ""), *(times.get(form, "") for form in forms)])
    packets = [f"packets, {form} threads a block" for form in forms]
    return _table(" | ".join(["ranks", "bytes", "direct", *packets]), lines)


def _copied(rows):
    lines = []
    for r in _named(rows, "small move"):
        times = [_us(r[way], 1) if r.get(way) else "" for way in ("interpreted", "packets")]
        share = f"{r['packets'] / r['predicted']:.2f}" if r.get("packets") else ""
        how = "" if r["right"] and times[1] else "**wrong**"
        lines.append([r["collective"], r["n"], r["nbytes"], *times, share, how])
    return _table("small copies | ranks | bytes to each | plan | packets | / predicted | ", lines)


def _met(row):
    return {None: "", True: "yes", False: "**no**"}[row["ok"]]


def _large(rows):
    copied = max((r["tb_s"] for r in _named(rows, "cudaMemcpyAsync")), default=math.nan)
    lines = []
    for r in _named(rows, "all_reduce", "speed"):
        shares = [f"{r[k]:.0%}" for k in ("of_own_traffic", "of_least_traffic")]
        shares += [f"{r['bar']:.0%}" if r["bar"] else "", _met(r)]
        registers = f"{r['registers']}{' (spills)' if r['spilled'] else ''}"
        size = f"{r['nbytes'] >> 20} MiB"
        times = _us(r["seconds"]), f"{r['seconds'] / r['predicted']:.2f}"
        lines.append([r["algorithm"], r["n"], size, *times, *shares, registers])
    head = "algorithm | ranks | bytes | time | / predicted | of own traffic | of 2·n·S | bar | met"
    head += " | registers"
    about = (
        f"Shares of what the traffic would take at {copied:.2f} TB/s, bytes read and written, the "
        "speed of the fastest copy. What a step of "
        "the ring or of halving-doubling touches about fits the L2 cache up to 64 MiB; of that, "
        "not all traffic reaches the memory. What is predicted is explained in docs/cuda-model.md."
    )
    return f"{about}\n\n{_table(head, lines)}" if lines else ""


def _passes(rows):
    lines = []
    for r in _named(rows, "pass"):
        speed = f"{r['nbytes'] / r['seconds'] / 1e9:.0f} GB/s"
        size, share = f"{r['nbytes'] >> 20} MiB", f"{r['share']:.0%}"
        lines.append([r["kernel"], size, _us(r["seconds"]), speed, share])
    return _table("pass over vectors | bytes | time | speed | of a copy", lines)


def _norms(rows):
    lines = []
    for r in _named(rows, "norm", "norm"):
        share, faster = (f"{r[k]:{form}}" if r.get(k) else "" for k, form in _NORM_FORMS)
        lines.append([r["way"], r["n"], r["tokens"], _us(r["seconds"], 1), share, faster])
    head = "all_reduce + residual + RMSNorm | ranks | tokens | time | of own traffic | faster by"
    return _table(head, lines)


_NORM_FORMS = (("share", ".0%"), ("faster", ".2f"))


def _others(rows):
    lines = []
    for r in (r for r in rows if r["name"] in _BASELINES):
        what, how = _BASELINES[r["name"]](r)
        time = "" if r["seconds"] is None or how == "**wrong**" else _us(r["seconds"])
        lines.append([what, r["n"], f"{r['nbytes'] / 2**20:g} MiB", time, how])
    return _table("baseline | ranks | bytes | time | ", lines)


def _narrow(row):
    beside = "**wrong**" if row["ok"] is False else f"by default {_us(row['default_seconds'])}"
    return f"two_shot_push, {row['threads']} threads a block", beside


def _move(row):
    what = f"{row['collective']}/{row['algorithm']}, {row['made_by']}"
    return what, f"{row['tb_s']:.2f} TB/s" if row["ok"] else "**wrong**"


def _message(row):
    how = "under MPS" if row["mps"] else "taking turns"
    beside = f"{row['gb_s']:.1f} GB/s each way, {how}, with the host's part"
    return f"message, {row['memory']} memory", beside if row["ok"] else "**wrong**"


def _process(row):
    what = {"native": "NCCL's own"}.get(row["algorithm"], row["algorithm"])
    how = "in CUDA graphs" if row["graph"] else f"by events, of {row['calls']} calls in a row"
    how += ", under MPS" if row["mps"] else ", taking turns"
    if row["seconds"] is None:
        how = "works: ranks on one device, through sockets"
    return f"processes over {row['transport']}, {what}", how if row["ok"] else "**wrong**"


_BASELINES = {  # what a row is about, and what else it says
    "cudaMemcpyAsync": lambda r: (r["name"], f"{r['tb_s']:.2f} TB/s"),
    "cupy sum": lambda r: ("CuPy sum and broadcast", f"{r['share']:.0%} of 2·n·S"),
    "narrow blocks": _narrow,
    "move": _move,
    "process all_reduce": _process,
    "process messages": _message,
}


def _tools(rows):
    lines = [
        [r["what"], " ".join(str(r["found"]).replace("|", " ").split())]
        for r in _named(rows, "tool")
    ]
    return _table("looked at | found", lines)


def draw(rows, path):
    """Draw the shares of the bounds, a group of bars for each world; nothing without Matplotlib."""
    rows = _named(rows, "all_reduce", "speed")
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
