"""An analysis as one HTML page that needs nothing else: no server, no network, no script."""

from __future__ import annotations

import html
from collections.abc import Iterator

import numpy as np

from pycoll.observe.page import duration
from pycoll.observe.report.advice import advise, headline
from pycoll.observe.report.analysis import LATE_NS, Analysis
from pycoll.observe.report.text import Table, changes, facts, tables

_SLOTS = 160  # columns of the picture over time
_WIDTH, _ROW = 960, 26
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1f2d3a;max-width:1040px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.35rem;margin:0 0 .4rem}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}
.lead{border-left:5px solid #c0392b;background:#fdf1ef;padding:.6rem .9rem}
.well{border-color:#2e8b57;background:#eef8f1}.todo{color:#566573}
table{border-collapse:collapse;width:100%}td,th{text-align:right;padding:.22rem .5rem;
border-bottom:1px solid #e3e7ea;font-variant-numeric:tabular-nums;white-space:nowrap}
.wide{overflow-x:auto}
td:first-child,th:first-child{text-align:left}th{color:#566573;font-weight:600}
svg{width:100%;min-width:720px;height:auto}
.key span{display:inline-block;width:.9em;height:.9em;margin:0 .35em 0 1em}
"""
OWN, MOVES, WAITS = "#dfe6ea", "#4c8fc9", "#e08a3c"


def render(seen: Analysis, before: Analysis | None = None) -> str:
    """Return the page."""
    findings = advise(seen)
    parts = [_lead(seen, findings)]
    parts += ["<h2>Over time</h2>", *_over_time(seen)]
    shown = tables(seen)
    if before is not None:
        shown = {"Changes": changes(before, seen)} | shown
    for title, table in shown.items():
        parts += [f"<h2>{html.escape(title)}</h2>", _table(table)]
    parts += [f'<p class="todo">{html.escape(line)}</p>' for line in facts(seen)]
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>pycoll report</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _lead(seen: Analysis, findings: list) -> str:
    lines = [f"<h1>{html.escape(headline(seen, findings))}</h1>"]
    for i, finding in enumerate(findings):
        if i:
            lines.append(f"<p>{html.escape(finding.text)}</p>")
        if finding.advice:
            lines.append(f'<p class="todo">To do: {html.escape(finding.advice)}</p>')
    return f'<div class="lead{"" if findings else " well"}">{"".join(lines)}</div>'


def _table(table: Table) -> str:
    head, rows = table
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    below = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{cells}</tr>{below}</table></div>'


def _over_time(seen: Analysis) -> Iterator[str]:
    """Draw for each rank what it did in each slot of time: own work, moving data, waiting."""
    begin, end = seen.trace.begin_ns, seen.trace.end_ns
    ranks = seen.trace.ranks[:64]
    inside = {rank: np.zeros(_SLOTS) for rank in ranks}
    waits = {rank: np.zeros(_SLOTS) for rank in ranks}
    slot = max((end - begin) / _SLOTS, 1.0)
    for group in seen.trace.groups:
        for place, rank in enumerate(group.members):
            if rank in inside:
                enter = group.enter_ns[place] - begin
                _spread(inside[rank], enter, group.leave_ns[place] - begin, slot)
                _spread(waits[rank], enter, enter + group.waited_ns[place], slot)
    height, left = _ROW * len(ranks) + 24, 60
    wide = (_WIDTH - left) / _SLOTS
    yield f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {height}" role="img">'
    for row, rank in enumerate(ranks):
        top, tall = row * _ROW, _ROW - 6
        yield f'<text x="0" y="{top + 15}" font-size="13">rank {rank}</text>'
        yield f'<rect x="{left}" y="{top}" width="{_WIDTH - left}" height="{tall}" fill="{OWN}"/>'
        for color, shares in ((MOVES, inside[rank]), (WAITS, waits[rank])):
            for k in np.flatnonzero(shares > 0.02):
                size = tall * min(shares[k], 1.0)
                at = f'x="{left + k * wide:.2f}" y="{top + tall - size:.2f}"'
                yield f'<rect {at} width="{wide:.2f}" height="{size:.2f}" fill="{color}"/>'
    y = height - 8
    yield f'<text x="{left}" y="{y}" font-size="12" fill="#566573">0 s</text>'
    yield (
        f'<text x="{_WIDTH}" y="{y}" font-size="12" fill="#566573" text-anchor="end">'
        f"{duration(seen.seconds)}</text></svg></div>"
    )
    keys = ((OWN, "own work"), (MOVES, "moves data"), (WAITS, "waits for others"))
    spans = "".join(f'<span style="background:{color}"></span>{text}' for color, text in keys)
    yield f'<p class="key">{spans}; last to enter counts from {LATE_NS // 1000} us on</p>'


def _spread(slots: np.ndarray, begin: np.ndarray, end: np.ndarray, slot: float) -> None:
    """Add to each slot the share of it that lies in one of the intervals."""
    there = ~np.isnan(begin) & ~np.isnan(end)
    edges = np.arange(slots.size + 1) * slot
    order = np.argsort(begin[there])
    starts, ends = begin[there][order], end[there][order]
    if not starts.size:
        return
    total = np.concatenate([[0.0], np.cumsum(ends - starts)])
    k = np.searchsorted(starts, edges, "right")
    last = np.maximum(k - 1, 0)
    open_ = np.where(k > 0, np.clip(ends[last] - edges, 0, None), 0.0)
    slots += np.clip(np.diff(total[k] - open_) / slot, 0, 1)
