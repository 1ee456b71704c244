"""The results of a comparison: JSON for machines, Markdown and a picture for people."""

import json
import statistics
from collections import defaultdict

OURS = ("pycoll", "pycoll symmetric")
KEYS = ("collective", "bytes", "in_place", "rotating")
CASE = ("collective", "n", "dtype", "in_place", "rotating")


def merge(found):
    """Turn the rounds of every cell into one row: the median of the rounds, and their range."""
    rows = []
    for (name, n, dtype, *key), cells in found.items():
        medians = [cell["median_us"] for cell in cells]
        rows.append(
            {
                "contestant": name,
                "n": n,
                "dtype": dtype,
                **dict(zip(KEYS, key, strict=True)),
                "median_us": statistics.median(medians),
                "rounds_us": [round(m, 3) for m in medians],
                "best_us": min(cell["best_us"] for cell in cells),
                "wrong": sum(cell["wrong"] for cell in cells),
            }
        )
    return rows


def by_case(rows):
    """Return {case: {bytes: {contestant: row}}}."""
    table = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        table[tuple(row[k] for k in CASE)][row["bytes"]][row["contestant"]] = row
    return table


def best_peer(cells, peers=None):
    """Return the fastest row that is not ours, or None."""
    others = [r for who, r in cells.items() if who not in OURS and (not peers or who in peers)]
    return min(others, key=lambda row: row["median_us"], default=None)


def ratio(cells, ours):
    """Return how many times as fast as the best peer we are, or None."""
    peer = best_peer(cells)
    return peer["median_us"] / cells[ours]["median_us"] if peer and ours in cells else None


def geometric_mean(values):
    """Return it, or None for no values."""
    values = list(values)
    return statistics.geometric_mean(values) if values else None


def title(case):
    """Return a case in words."""
    collective, n, dtype, in_place, rotating = case
    place = "" if collective == "broadcast" else ", in place" if in_place else ", out of place"
    buffers = "many arrays in turn" if rotating else "the same arrays again"
    return f"{collective}, {dtype}, {n} ranks{place}, {buffers}"


def size_text(nbytes):
    """Return 8 B, 64 KiB, 1 MiB."""
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def _time(row):
    if row is None:
        return ""
    low, high = min(row["rounds_us"]), max(row["rounds_us"])
    return f"{row['median_us']:.3g} ({low:.3g}-{high:.3g})"


def _times(value):
    if value is None:
        return ""
    return f"{value:.2f}" if value >= 1 else f"**{value:.2f}**"


def table_of(sizes):
    """Return the Markdown table of one case."""
    lines = [
        "| size | best peer | us (rounds) | gloo us | pycoll us | x | symmetric us | x |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for nbytes, cells in sorted(sizes.items()):
        peer = best_peer(cells)
        row = [size_text(nbytes), peer["contestant"] if peer else "", _time(peer)]
        row.append(_time(cells.get("gloo")))
        for ours in OURS:
            row += [_time(cells.get(ours)), _times(ratio(cells, ours))]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def summary(table):
    """Return the Markdown table of geometric means and worst cells of all cases."""
    lines = [
        "| case | pycoll: mean | worst | symmetric: mean | worst |",
        "|---|---|---|---|---|",
    ]
    for case, sizes in table.items():
        row = [title(case)]
        for ours in OURS:
            found = [(ratio(cells, ours), size) for size, cells in sizes.items()]
            found = [(value, size) for value, size in found if value is not None]
            worst = min(found, default=None)
            row.append(_times(geometric_mean(value for value, _ in found)))
            row.append(f"{_times(worst[0])} at {size_text(worst[1])}" if worst else "")
        lines.append(f"| {' | '.join(row)} |")
    return lines


def markdown(document):
    """Return the whole report as Markdown."""
    machine, table = document["machine"], by_case(document["cells"])
    cpu = machine["cpu"] + (" (virtual)" if machine["virtual"] else "")
    wrong = sum(row["wrong"] for row in document["cells"])
    packages = ", ".join(f"{name} {v}" for name, v in sorted(document["versions"].items()))
    lines = [
        "# pycoll beside its peers",
        "",
        f"`{document['command'].strip()}`, {document['date']}, {machine['cores']} cores of "
        f"{cpu}, Linux {machine['kernel']}, pycoll {machine['pycoll']} at {machine['commit']}, "
        f"Python {machine['python']}, {packages}. {document['rounds']} rounds of all in turn; "
        f"wrong elements: {wrong}.",
        "",
        "Times are microseconds a call on the slowest rank: the median of the rounds, and in "
        "brackets the range of the rounds. x: how many times as fast as the fastest peer in that "
        "cell; **bold: slower**. Sizes are bytes of the full vector.",
        "",
        *summary(table),
    ]
    for case, sizes in table.items():
        lines += ["", f"## {title(case)}", "", *table_of(sizes)]
    if document["skipped"]:
        lines += ["", "## Left out", ""]
        lines += [f"- {s['who']} ({s['dtype']}): {s['why']}" for s in document["skipped"]]
    return "\n".join(lines) + "\n"


def draw(document, path):
    """Draw how many times as fast as the best peer, a panel for each collective and n."""
    from matplotlib.figure import Figure

    table = by_case(row for row in document["cells"] if row["dtype"] == "float32")
    panels = sorted({case[:2] for case in table}, key=lambda p: (p[1], p[0]))
    if not panels:
        return
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(7.5, 3.6 * columns), 2.9 * rows + 1.3), dpi=130, facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    colours = {"pycoll": "#0072b2", "pycoll symmetric": "#d55e00"}
    for ax, (collective, n) in zip(axes, panels, strict=False):
        ax.axhspan(1e-3, 1, color="#f6d5d5", lw=0)
        for case in (case for case in table if case[:2] == (collective, n)):
            for ours in OURS:
                found = {s: ratio(cells, ours) for s, cells in sorted(table[case].items())}
                points = [(s, v) for s, v in found.items() if v is not None]
                label = f"{ours}{', arrays in turn' if case[4] else ''}"
                style = {"ls": "--" if case[4] else "-", "alpha": 1 if case[3] else 0.85}
                if points:
                    ax.plot(*zip(*points, strict=True), color=colours[ours], label=label, **style)
        ax.set_title(f"{collective}, {n} ranks", fontsize=9, loc="left")
        ax.grid(color="#e3e7ec", lw=0.6)
        ax.tick_params(labelsize=7)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    values = [v for s in table.values() for c in s.values() for o in OURS if (v := ratio(c, o))]
    axes[0].set(xscale="log", yscale="log", ylim=(min(0.5, *values) / 1.2, max(values) * 1.4))
    ticks = [8, 1 << 10, 64 << 10, 1 << 20, 64 << 20]
    axes[0].set_xticks(ticks, [size_text(t) for t in ticks])
    axes[0].set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axes[0].minorticks_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=2, loc="lower center", frameon=False)
    figure.suptitle("Speed beside the fastest of MPICH, Open MPI and gloo (float32)", fontsize=11)
    figure.tight_layout(rect=(0, 0.45 / (2.9 * rows + 1.3), 1, 0.98))
    figure.savefig(path)


def write(document, stem):
    """Write stem.json, stem.md and stem.png."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(document), encoding="utf-8")
    draw(document, stem.with_suffix(".png"))
    print("\n".join(summary(by_case(document["cells"]))))
    print(f"written: {stem}.json, .md, .png")
