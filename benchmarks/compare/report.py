"""The results of a comparison: JSON for machines, Markdown and a picture for people."""

import json
import statistics
from collections import defaultdict

from launch import LIMITS

# Our contestants, each with those it is compared with; nobody named: with all others.
OURS = {
    "pycoll": (),
    "pycoll symmetric": (),
    "pycoll over MPICH": ("MPICH", "MPICH multiple"),
    "pycoll over Open MPI": ("Open MPI",),
}
COLOURS = dict(zip(OURS, ("#0072b2", "#d55e00", "#0072b2", "#d55e00"), strict=True))
KEYS = ("collective", "bytes", "in_place", "rotating")
CASE = ("collective", "n", "dtype", "in_place", "rotating")
LIMITED_FROM = 64 << 10  # bytes; below, the time is that of the call and of the others' flags


def merge(found):
    """Turn the rounds of every cell into one row, with their median."""
    rows = []
    for (name, n, dtype, *key), row in found.items():
        median = statistics.median(us for us in row["rounds_us"] if us is not None)
        cell = {"contestant": name, "n": n, "dtype": dtype, **dict(zip(KEYS, key, strict=True))}
        rows.append(cell | {"median_us": median} | row)
    return rows


def by_case(rows):
    """Return {case: {bytes: {contestant: row}}}."""
    table = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        table[tuple(row[k] for k in CASE)][row["bytes"]][row["contestant"]] = row
    return table


def best_peer(cells, peers=None):
    """Return the fastest row that is not ours, or None."""
    others = [
        row
        for who, row in cells.items()
        if who not in (*OURS, *LIMITS) and (not peers or who in peers)
    ]
    return min(others, key=lambda row: row["median_us"], default=None)


def ratio(cells, ours):
    """Return how many times as fast as the best peer we are, or None.

    That is the median of the ratios of the rounds: what was measured within the same second.
    """
    return _over_rounds(best_peer(cells, OURS[ours]), cells.get(ours))


def at_most(cells):
    """Return how many times as fast as the best peer anything can be, or None if that is unknown.

    That is as fast as one pass over the arrays, with those stores that suit it best.
    """
    passes = [cells[who] for who in LIMITS if who in cells and cells[who]["bytes"] >= LIMITED_FROM]
    return _over_rounds(best_peer(cells), min(passes, key=lambda r: r["median_us"], default=None))


def is_limited(sizes):
    """Return whether the limits of a case were measured, too."""
    return any(who in cells for cells in sizes.values() for who in LIMITS)


def mean_at_most(sizes):
    """Return the geometric mean of what is possible at most; of small sizes what was reached."""
    reached = [max(filter(None, (ratio(c, who) for who in OURS)), default=None) for c in sizes]
    known = [at_most(cells) or best for cells, best in zip(sizes, reached, strict=True)]
    return geometric_mean(filter(None, known))


def _over_rounds(peer, row):
    if not peer or not row:
        return None
    rounds = zip(peer["rounds_us"], row["rounds_us"], strict=True)
    ratios = [a / b for a, b in rounds if a is not None and b is not None]
    return statistics.median(ratios) if ratios else None


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
    rounds = [us for us in row["rounds_us"] if us is not None]
    return f"{row['median_us']:.3g} ({min(rounds):.3g}-{max(rounds):.3g})"


def _times(value):
    if value is None:
        return ""
    return f"{value:.2f}" if value >= 1 else f"**{value:.2f}**"


def present(table):
    """Return which of our contestants were measured."""
    found = {who for sizes in table.values() for cells in sizes.values() for who in cells}
    return [who for who in OURS if who in found]


def table_of(sizes, ours):
    """Return the Markdown table of one case."""
    if "pycoll" not in ours:
        return _table_by_peer(sizes, ours)
    heads = ["size", "best peer", "us (rounds)", "gloo us", "pycoll us", "x", "symmetric us", "x"]
    heads += ["at most"] if is_limited(sizes) else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for nbytes, cells in sorted(sizes.items()):
        peer = best_peer(cells)
        row = [size_text(nbytes), peer["contestant"] if peer else "", _time(peer)]
        row.append(_time(cells.get("gloo")))
        for who in ("pycoll", "pycoll symmetric"):
            row += [_time(cells.get(who)), _times(ratio(cells, who))]
        row += [_times(at_most(cells))] if is_limited(sizes) else []
        lines.append(f"| {' | '.join(row)} |")
    return lines


def _table_by_peer(sizes, ours):
    """Return the table of a case in which each of ours is beside peers of its own."""
    heads = [f"{OURS[who][0]} us (rounds) | {who} us | x" for who in ours]
    lines = [f"| size | {' | '.join(heads)} |", "|---" * (1 + 3 * len(ours)) + "|"]
    for nbytes, cells in sorted(sizes.items()):
        row = [size_text(nbytes)]
        for who in ours:
            peer = best_peer(cells, OURS[who])
            row += [_time(peer), _time(cells.get(who)), _times(ratio(cells, who))]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def summary(table):
    """Return the Markdown table of geometric means and worst cells of all cases."""
    ours, limited = present(table), any(is_limited(sizes) for sizes in table.values())
    heads = [head for who in ours for head in (f"{who}: mean", "worst")]
    heads += ["mean at most"] if limited else []
    lines = [f"| case | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for case, sizes in table.items():
        row = [title(case)]
        for who in ours:
            found = [(ratio(cells, who), size) for size, cells in sizes.items()]
            found = [(value, size) for value, size in found if value is not None]
            worst = min(found, default=None)
            row.append(_times(geometric_mean(value for value, _ in found)))
            row.append(f"{_times(worst[0])} at {size_text(worst[1])}" if worst else "")
        row += [_times(mean_at_most(sizes.values()))] if limited else []
        lines.append(f"| {' | '.join(row)} |")
    return lines


def limits_explained(table):
    """Return the lines that say what "at most" is, if it was measured."""
    if not any(is_limited(sizes) for sizes in table.values()):
        return []
    return [
        "",
        "At most: how many times as fast as the fastest peer one pass over the arrays is, from 64 "
        "KiB on: each rank reads of its own arrays what the collective must read and writes what "
        "it must write, once, with those stores that suit it best, and neither waits nor fetches "
        "anything. No library can do the collective faster on these cores; of broadcast and "
        "reduce that holds for ordinary arrays, since in symmetric memory ranks can share the "
        "work. The mean takes what was reached for the small sizes.",
    ]


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
        "cell, over MPI the same MPI at its faster thread level, as the median of the ratios of "
        "the rounds; **bold: slower**. Sizes are bytes of the full vector.",
        *limits_explained(table),
        "",
        *summary(table),
    ]
    for case, sizes in table.items():
        lines += ["", f"## {title(case)}", "", *table_of(sizes, present(table))]
    if document["skipped"]:
        lines += ["", "## Left out", ""]
        lines += [f"- {s['who']} ({s['dtype']}): {s['why']}" for s in document["skipped"]]
    return "\n".join(lines) + "\n"


def draw(document, path):
    """Draw how many times as fast as the best peer: a panel for arrays again and in turn."""
    from matplotlib.figure import Figure

    table = by_case(row for row in document["cells"] if row["dtype"] == "float32")
    panels = list(dict.fromkeys(case[:4] for case in table))
    if not panels:
        return
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(7.5, 3.6 * columns), 2.9 * rows + 1.3), dpi=130, facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for ax, panel in zip(axes, panels, strict=False):
        ax.axhspan(1e-3, 1, color="#f6d5d5", lw=0)
        for case in (case for case in table if case[:4] == panel):
            for ours in OURS:
                found = {s: ratio(cells, ours) for s, cells in sorted(table[case].items())}
                points = [(s, v) for s, v in found.items() if v is not None]
                label = f"{ours}{', arrays in turn' if case[4] else ''}"
                style = {"ls": "--" if case[4] else "-", "color": COLOURS[ours], "label": label}
                if points:
                    ax.plot(*zip(*points, strict=True), **style)
        collective, n, _, in_place = panel
        how = "in place, " if in_place and collective == "all_gather" else ""
        ax.set_title(f"{collective}, {how}{n} ranks", fontsize=9, loc="left")
        ax.grid(color="#e3e7ec", lw=0.6)
        ax.tick_params(labelsize=7)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    values = [v for s in table.values() for c in s.values() for o in OURS if (v := ratio(c, o))]
    axes[0].set(
        xscale="log", yscale="log", ylim=(min([0.5, *values]) / 1.2, max([1, *values]) * 1.4)
    )
    ticks = [8, 1 << 10, 64 << 10, 1 << 20, 64 << 20]
    axes[0].set_xticks(ticks, [size_text(t) for t in ticks])
    axes[0].set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axes[0].minorticks_off()
    for ax in axes[max(0, len(panels) - columns) : len(panels)]:
        ax.tick_params(labelbottom=True)  # also where there is no panel below
    named = {line.get_label(): line for ax in axes for line in ax.get_lines()}
    figure.legend(
        named.values(), named.keys(), fontsize=8, ncols=2, loc="lower center", frameon=False
    )
    figure.supylabel("times as fast", fontsize=8)
    peers = (
        "the fastest of MPICH, Open MPI and gloo" if "pycoll" in present(table) else "the same MPI"
    )
    figure.suptitle(f"Speed beside {peers} (float32)", fontsize=11)
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
