"""The results of a comparison: JSON for machines, Markdown and a picture for people."""

import statistics
from collections import defaultdict

from contestants import LIMITS
from harness import pages
from harness.pages import size as size_text

from cases import Case

# Our contestants, each with those it is compared with; nobody named: with all others.
OURS = {
    "pycoll": (),
    "pycoll symmetric": (),
    "pycoll over MPICH": ("MPICH", "MPICH multiple"),
    "pycoll over Open MPI": ("Open MPI",),
}
COLOURS = dict(zip(OURS, ("#0072b2", "#d55e00", "#0072b2", "#d55e00"), strict=True))
KEYS = ("collective", "bytes", "in_place", "rotating")
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
        table[Case(*(row[k] for k in Case._fields))][row["bytes"]][row["contestant"]] = row
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


def ratios(sizes, ours):
    """Return [(bytes, ratio)] of a case, for the sizes at which it was measured."""
    found = [(size, ratio(cells, ours)) for size, cells in sorted(sizes.items())]
    return [(size, value) for size, value in found if value is not None]


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
    """Return the Markdown table of one case; over MPI, each of ours beside peers of its own."""
    lines, limited = [], is_limited(sizes)
    if "pycoll" in ours:
        head = ["best peer", "us (rounds)", "gloo us", "pycoll us", "x", "symmetric us", "x"]
    else:
        head = [t for who in ours for t in (f"{OURS[who][0]} us (rounds)", f"{who} us", "x")]
    for nbytes, cells in sorted(sizes.items()):
        row, peer = [size_text(nbytes)], best_peer(cells)
        if "pycoll" in ours:
            row += [peer["contestant"] if peer else "", _time(peer), _time(cells.get("gloo"))]
        for who in ("pycoll", "pycoll symmetric") if "pycoll" in ours else ours:
            row += [_time(best_peer(cells, OURS[who]))] if OURS[who] else []
            row += [_time(cells.get(who)), _times(ratio(cells, who))]
        lines.append(row + [_times(at_most(cells))] * limited)
    return pages.table(["size", *head, *["at most"] * limited], lines)


def summary(table):
    """Return the Markdown table of geometric means and worst cells of all cases."""
    ours, limited = present(table), any(is_limited(sizes) for sizes in table.values())
    lines = []
    for case, sizes in table.items():
        row = [case.title]
        for who in ours:
            found = [(value, size) for size, value in ratios(sizes, who)]
            row.append(_times(geometric_mean(value for value, _ in found)))
            worst = min(found, default=None)
            row.append(f"{_times(worst[0])} at {size_text(worst[1])}" if worst else "")
        lines.append(row + [_times(mean_at_most(sizes.values()))] * limited)
    head = ["case", *(text for who in ours for text in (f"{who}: mean", "worst"))]
    return pages.table(head + ["mean at most"] * limited, lines)


AT_MOST = """\
At most: how many times as fast as the fastest peer one pass over the arrays is, from 64 KiB on: \
each rank reads of its own arrays what the collective must read and writes what it must write, \
once, with those stores that suit it best, and neither waits nor fetches anything. No library can \
do the collective faster on these cores; of broadcast and reduce that holds for ordinary arrays, \
since in symmetric memory ranks can share the work. The mean takes what was reached for the small \
sizes."""


def write(document, stem):
    table = by_case(document["cells"])
    wrong = sum(row["wrong"] for row in document["cells"])
    packages = ", ".join(f"{name} {v}" for name, v in sorted(document["versions"].items()))
    about = (
        f"{packages}; {document['rounds']} rounds of all in turn; wrong elements: {wrong}.\n\n"
        "Times are microseconds a call on the slowest rank: the median of the rounds, and in "
        "brackets the range of the rounds. x: how many times as fast as the fastest peer in that "
        "cell, over MPI the same MPI at its faster thread level, as the median of the ratios of "
        "the rounds; **bold: slower**. Sizes are bytes of the full vector."
    )
    lines = [AT_MOST, ""] if any(is_limited(sizes) for sizes in table.values()) else []
    lines += summary(table)
    for case, sizes in table.items():
        lines += ["", f"## {case.title}", "", *table_of(sizes, present(table))]
    if document["skipped"]:
        lines += ["", "## Left out", ""]
        lines += [f"- {s['who']} ({s['dtype']}): {s['why']}" for s in document["skipped"]]
    pages.write(stem, "pycoll beside its peers", about, lines, document)
    draw(table, stem.with_suffix(".png"))


def draw(table, path):
    """Draw how many times as fast as the best peer: a panel for arrays again and in turn."""
    from matplotlib.figure import Figure

    table = {case: sizes for case, sizes in table.items() if case.dtype == "float32"}
    panels = list(dict.fromkeys(case[:4] for case in table))
    if not panels:
        return
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(7.5, 3.6 * columns), 2.9 * rows + 1.3), dpi=130, facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for ax, panel in zip(axes, panels, strict=False):
        _draw_panel(ax, {case: sizes for case, sizes in table.items() if case[:4] == panel})
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    values = [v for sizes in table.values() for who in OURS for _, v in ratios(sizes, who)]
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
    shared = "the fastest of MPICH, Open MPI and gloo"
    peers = shared if "pycoll" in present(table) else "the same MPI"
    figure.suptitle(f"Speed beside {peers} (float32)", fontsize=11)
    figure.tight_layout(rect=(0, 0.45 / (2.9 * rows + 1.3), 1, 0.98))
    figure.savefig(path)


def _draw_panel(ax, table):
    """Draw the cases of one panel."""
    ax.axhspan(1e-3, 1, color="#f6d5d5", lw=0)
    for case, sizes in table.items():
        for ours in OURS:
            points = ratios(sizes, ours)
            label = f"{ours}{', arrays in turn' if case.rotating else ''}"
            style = {"ls": "--" if case.rotating else "-", "color": COLOURS[ours], "label": label}
            if points:
                ax.plot(*zip(*points, strict=True), **style)
    how = "in place, " if case.in_place and case.collective == "all_gather" else ""
    ax.set_title(f"{case.collective}, {how}{case.n} ranks", fontsize=9, loc="left")
    ax.grid(color="#e3e7ec", lw=0.6)
    ax.tick_params(labelsize=7)
