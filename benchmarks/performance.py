"""Write the figures of README.md and of two pages in docs from what benchmarks/results holds.

``python benchmarks/performance.py`` replaces what lies between ``<!-- NAME: begin -->`` and
``<!-- NAME: end -->``; with ``--check`` it changes nothing and fails if something would change.
"""

import argparse
import json
import sys
from pathlib import Path

from harness import pages
from harness.pages import RESULTS
from harness.start import ROOT

PAGES = tuple(ROOT / p for p in ("README.md", "docs/performance.md", "docs/failures.md"))
COMPARED = ("compare", "compare_epyc7003", "compare_xeon")
BENCHES = ("all_reduce_n2_symmetric", "all_reduce_n2_ordinary")
KINDS = {"pycoll": "ordinary", "pycoll symmetric": "symmetric"}
OVER_MPI = ("pycoll over MPICH", "pycoll over Open MPI")
sys.path.insert(0, str(Path(__file__).with_name("compare")))

import failures as failures_page
import report


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def machine(document):
    """Return the processor of a result in words."""
    found = document["machine"]
    cpu = found["cpu"].replace("(R)", "").replace(" Processor", "")
    return f"{cpu}, {found['folds'].upper().replace('AVX512', 'AVX-512')}"


def place(case):
    """Return a case in few words, a different one for each."""
    collective, n, dtype, in_place, rotating = case
    words = {
        f"`{collective}`": True,
        dtype: dtype != "float32",
        f"{n} ranks": n != 2,
        "in place": in_place and collective == "all_gather",
        "rotating arrays": rotating,
    }
    return ", ".join(word for word, matters in words.items() if matters)


def number(value):
    """Return a ratio, in bold where pycoll is slower."""
    if value is None:
        return ""
    text = f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"
    return text if value >= 1 else f"**{text}**"


def pair(values):
    """Return two ratios in one cell, or nothing where neither is known."""
    texts = [number(value) for value in values]
    return " / ".join(texts) if any(texts) else ""


def lost_cells(name):
    """Return in how many cells of a comparison pycoll is slower, and of how many."""
    table = report.by_case(load(name)["cells"])
    found = [v for t in table.values() for ours in KINDS for _, v in report.ratios(t, ours)]
    return f"{sum(v < 1 for v in found)} of {len(found)}"


def numbers():
    """Return the three numbers of the front page."""
    peers, own, failed = load(COMPARED[0]), load("overhead"), load("failures")
    cases = {place(case): sizes for case, sizes in report.by_case(peers["cells"]).items()}
    means = [
        number(report.geometric_mean(v for _, v in report.ratios(cases["`all_reduce`"], ours)))
        for ours in KINDS
    ]
    call = own["rows"][0]["measured"]["median_us"]
    killed = max(rank["seconds"] for rank in failed["results"]["pycoll"]["killed"] if rank)
    body = [
        [
            f"**{means[0]} and {means[1]} times** as fast",
            "`all_reduce` beside the fastest of MPICH, Open MPI and gloo, with ordinary and with "
            "symmetric arrays: mean over 8 B to 64 MiB, 2 ranks. In all collectives together a "
            f"peer is faster in {lost_cells(COMPARED[0])} cells",
            peers,
        ],
        [f"**{call:.2f} us**", "`all_reduce` of 8 B from Python, 2 ranks", own],
        [f"**{1000 * killed:.0f} ms**", "until every rank left knows who was killed", failed],
    ]
    head = ["", "what", "machine", "command"]
    rows = [[n, text, f"{machine(d)}, 2 cores", f"`{d['command'].strip()}`"] for n, text, d in body]
    return pages.table(head, rows)


def compared():
    """Return the geometric means of every case on every machine."""
    documents = [load(name) for name in COMPARED]
    tables = [report.by_case(d["cells"]) for d in documents]

    def means(sizes):
        return pair(
            report.geometric_mean(v for _, v in report.ratios(sizes, ours)) for ours in KINDS
        )

    head = ["ordinary / symmetric", *map(machine, documents)]
    return pages.table(head, [[place(c), *(means(t[c]) for t in tables)] for c in tables[0]])


def losses():
    """Return every cell in which pycoll is slower than the fastest peer."""
    lines, counts = {}, []
    for column, name in enumerate(COMPARED):
        lost = cells = 0
        for case, sizes in report.by_case(load(name)["cells"]).items():
            for ours, kind in KINDS.items():
                found = report.ratios(sizes, ours)
                slower = [f"{v:.2f} at {report.size_text(size)}" for size, v in found if v < 1]
                cells, lost = cells + len(found), lost + len(slower)
                row = lines.setdefault((place(case), kind), [""] * len(COMPARED))
                row[column] = ", ".join(slower)
        counts.append(f"{lost} of {cells}")
    head = ["slower than the fastest peer", *(machine(load(name)) for name in COMPARED)]
    body = [[f"{case}, {kind}", *row] for (case, kind), row in lines.items() if any(row)]
    return pages.table(head, [["cells", *counts], *body])


def sizes_table(corner, table, both):
    """Return a table with a column for each size, with the ratios of two of our contestants."""
    sizes = sorted({size for found in table.values() for size in found})

    def cell(cells):
        return pair(report.ratio(cells, ours) for ours in both)

    rows = [[place(case), *(cell(table[case][size]) for size in sizes)] for case in table]
    return pages.table([corner, *map(report.size_text, sizes)], rows)


def over_mpi():
    """Return pycoll over MPICH / over Open MPI, by size."""
    table = report.by_case(load("compare_mpi")["cells"])
    return sizes_table("MPICH / Open MPI", table, OVER_MPI)


def between_hosts():
    """Return how many times as fast as the same MPI's own all-reduce, between hosts."""
    found = {}
    for row in load("hosts")["rows"]:
        if row.get("own_us"):
            mpi = row["mpi"].rsplit(" ", 1)[0]
            key = f"{row['hosts']} hosts x {row['ranks']}, {row['mbit']} Mbit/s, {mpi}"
            found.setdefault(key, {})[row["nbytes"]] = row["own_us"] / row["pycoll_us"]
    lines = []
    for key, sizes in found.items():
        low, high = (report.size_text(pick(sizes)) for pick in (min, max))
        slower = [f"{v:.2f} at {report.size_text(s)}" for s, v in sorted(sizes.items()) if v < 1]
        mean = number(report.geometric_mean(sizes.values()))
        best = number(max(sizes.values()))
        lines.append([key, f"{low} to {high}", mean, best, ", ".join(slower)])
    return pages.table(["", "sizes", "mean", "best", "slower"], lines)


def overhead():
    """Return what pycoll adds to the least that is needed."""
    text = (RESULTS / "overhead.md").read_text(encoding="utf-8")
    table = text[text.index("| what") :].strip().splitlines()
    return [f"`python benchmarks/overhead.py`, {machine(load('overhead'))}:", "", *table]


def bench():
    """Return `pycoll bench all_reduce -n 2`, with and without symmetric memory."""
    cells = {}
    for name in BENCHES:
        for row in load(name)["rows"]:
            text = (
                f"{row['time_us']:.2f} us" if row["time_us"] < 100 else f"{row['time_us']:.0f} us"
            )
            text += f", {row['busbw']:.1f} GB/s" if row["nbytes"] >= 32 << 10 else ""
            cells.setdefault(row["nbytes"], {})[name, row["in_place"]] = text
    ways = [(name, in_place) for name in BENCHES for in_place in (True, False)]
    head = ["size", "symmetric, in place", "out of place", "ordinary, in place", "out of place"]
    body = [[report.size_text(s), *(row[way] for way in ways)] for s, row in sorted(cells.items())]
    return [f"{machine(load(BENCHES[0]))}:", "", *pages.table(head, body)]


def by_size():
    """Return all ratios on all machines: ordinary / symmetric."""
    lines = []
    for name in COMPARED:
        document = load(name)
        source = f"[all times](../benchmarks/results/{name}.md)"
        commit = document["machine"]["commit"]
        about = f"`{document['command']}`, {document['date']}, pycoll at {commit}; {source}."
        lines += [f"### {machine(document)}", "", about, ""]
        lines += [
            *sizes_table("ordinary / symmetric", report.by_case(document["cells"]), KINDS),
            "",
        ]
    return lines[:-1]


def failures():
    """Return what ranks get when one of them differs, or is gone."""
    return failures_page.table(load("failures")["results"])


BLOCKS = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(numbers, failures, compared, losses),
        *(over_mpi, between_hosts, overhead, bench, by_size),
    )
}


def filled(text):
    """Return a page with all its blocks as the results have them."""
    for name, function in BLOCKS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            before, rest = text.split(begin)
            text = "\n".join([before + begin, "", *function(), "", end + rest.split(end)[1]])
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it would")
    args = parser.parse_args()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if filled(text) == text:
            continue
        if args.check:
            sys.exit(f"{page.name} is not what the results say: run benchmarks/performance.py")
        page.write_text(filled(text), encoding="utf-8")
        print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
