"""A schedule as a page to step through: what every rank holds after each round.

One HTML file that needs nothing else. A cell is a chunk on a rank; its stripes are the ranks whose
data are in it. Several schedules stand beside each other, round by round.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.schedule.cost.cost import active
from pycoll.schedule.ir import Buffer, Schedule
from pycoll.schedule.language.collectives import COLLECTIVES, OWN
from pycoll.schedule.pictures import MAX_RANKS, Arrow, caption, place_of, transfers

# A place is (rank, buffer, chunk); what it holds is the chunk and the ranks whose data are in it.
Place = tuple[int, Buffer, int]
Held = tuple[int, frozenset[int]]
MOST_CELLS = 1024  # of a schedule: ranks times chunks


def stepped(schedules: Sequence[Schedule]) -> str:
    """Return the page.

    Args:
        schedules: At most four; rounds of one that is shorter stay at its last.

    Raises:
        ArgumentError: If there are too many ranks or chunks to tell apart.
    """
    for schedule in schedules:
        if schedule.n > MAX_RANKS or schedule.n * schedule.chunks > MOST_CELLS:
            raise ArgumentError(
                f"{schedule} has {schedule.n} ranks and {schedule.chunks} chunks; a page shows at "
                f"most {MAX_RANKS} ranks and {MOST_CELLS} cells. Take a smaller world, or fewer "
                "blocks (--param k=4): the pattern is the same"
            )
    title = " beside ".join(schedule.algorithm.name for schedule in schedules)
    shown = [described(schedule) for schedule in schedules]
    data = json.dumps(shown, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return _PAGE.replace("TITLE", html.escape(title)).replace("DATA", data)


def described(schedule: Schedule) -> dict[str, Any]:
    """Return what the page knows of a schedule: all cells and arrows, round by round.

    A cell is ``[chunk, ranks]``, or None while it holds nothing. The cells of a rank are its
    chunks, then its slots of scratch memory.
    """
    title, figures = caption(schedule)
    states = list(_states(schedule))
    slots = 1 + max((c for state in states for _, b, c in state if b == Buffer.TMP), default=-1)
    arrows: list[list[list[int]]] = [[] for _ in states]
    for item in transfers(schedule):
        if isinstance(item, Arrow):
            arrows[item.round + 1].append([item.src, item.dst, item.chunk, item.count])
    return {
        "title": title,
        "figures": figures,
        "n": schedule.n,
        "chunks": schedule.chunks,
        "slots": slots,
        "cells": [_cells(schedule, state, slots) for state in states],
        "arrows": arrows,
    }


def _states(schedule: Schedule) -> Any:
    """Yield what every place holds at the start, and after each round."""
    n, kind = schedule.n, COLLECTIVES[schedule.collective]
    held: dict[Place, Held] = {}
    for rank in range(n):
        if not kind.in_at_root or rank == schedule.params.get("root", 0):
            own = schedule.chunks // n
            chunks = range(rank * own, (rank + 1) * own) if kind.in_layout == OWN else None
            for chunk in chunks or range(schedule.chunks):
                held[rank, Buffer.IN, chunk] = chunk, frozenset([rank])
    yield dict(held)
    for folds in schedule.rounds(schedule.all_ranks()):
        for fold in folds:
            count, written = active(fold, n), {}
            for owner in np.flatnonzero(count).tolist():
                for step in range(int(count[owner])):
                    places = [
                        _shifted(place_of(piece, owner, n), step, schedule.chunks, held)
                        for piece in fold.pieces
                    ]
                    values = [held[place] for place in places[: len(fold.srcs)]]
                    value = values[0][0], frozenset().union(*(ranks for _, ranks in values))
                    for rank, buffer, chunk in places[len(fold.srcs) :]:
                        to = Buffer.OUT if buffer == Buffer.ACC else buffer
                        written[rank, to, chunk] = value
            held |= written
        yield dict(held)


def _shifted(place: Place, step: int, chunks: int, held: dict[Place, Held]) -> Place:
    """Return the place some chunks on; ACC is IN until OUT is written."""
    rank, buffer, chunk = place[0], place[1], place[2] + step
    chunk = chunk if buffer == Buffer.TMP else chunk % chunks
    if buffer == Buffer.ACC:
        buffer = Buffer.OUT if (rank, Buffer.OUT, chunk) in held else Buffer.IN
    return rank, buffer, chunk


def _cells(schedule: Schedule, state: dict[Place, Held], slots: int) -> list[list[Any]]:
    def cell(rank: int, chunk: int) -> Any:
        found = state.get((rank, Buffer.OUT, chunk)) or state.get((rank, Buffer.IN, chunk))
        return found and [found[0], sorted(found[1])]

    def slot(rank: int, number: int) -> Any:
        found = state.get((rank, Buffer.TMP, number))
        return found and [found[0], sorted(found[1])]

    ranks, chunks = range(schedule.n), range(schedule.chunks)
    return [[cell(r, c) for c in chunks] + [slot(r, s) for s in range(slots)] for r in ranks]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<meta name="viewport" content="width=device-width">
<style>
body{font:15px/1.45 system-ui,sans-serif;color:#1f2933;margin:1.2rem}
h2{font-size:1.05rem;margin:.2rem 0}p{margin:.2rem 0;color:#52606d}
#all{display:flex;flex-wrap:wrap;gap:2rem}
section{max-width:100%}svg{max-width:100%;height:auto}
nav{margin:.6rem 0 1rem;display:flex;gap:.5rem;align-items:center;flex-wrap:wrap}
button{font:inherit;padding:.2rem .8rem;cursor:pointer}input{width:16rem}
text{font-size:11px;fill:#52606d}.key i{display:inline-block;width:.8em;height:.8em;
margin:0 .3em 0 .9em}.key span{white-space:nowrap}
</style></head><body>
<nav><button id="back" aria-label="back">&larr;</button><button id="play">play</button>
<button id="next" aria-label="next">&rarr;</button><input id="at" aria-label="round"
type="range" min="0" value="0">
<b id="where"></b></nav>
<div id="all"></div>
<p class="key" id="key"></p>
<p>A row is a rank, a cell a chunk of the vector. Stripes are the ranks whose data are in it. A
frame marks what the round has written; an arrow is what moved between ranks. Cells after the gap
are scratch memory. The arrow keys step.</p>
<script>
const all = DATA;
const most = Math.max(...all.map(s => s.cells.length)) - 1;
const ranks = Math.max(...all.map(s => s.n));
const colour = r => `hsl(${Math.round(r * 360 / ranks + (r % 2) * 12)} 62% ${48 + (r % 3) * 8}%)`;
const size = 30, gap = 8, left = 56, top_ = 22;
const el = id => document.getElementById(id);
const x = (s, i) => left + i * (size + 4) + (i < s.chunks ? 0 : 18);
const y = r => top_ + r * (size + gap);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

function cell(s, step, r, i) {
  const value = s.cells[step][r][i], before = step ? s.cells[step - 1][r][i] : value;
  let svg = `<rect x="${x(s, i)}" y="${y(r)}" width="${size}" height="${size}" fill="#eef1f4"/>`;
  if (!value) return svg;
  const wide = size / value[1].length;
  value[1].forEach((from, k) => svg += `<rect x="${x(s, i) + k * wide}" y="${y(r)}"
    width="${wide}" height="${size}" fill="${colour(from)}"/>`);
  if (!same(value, before)) svg += `<rect x="${x(s, i)}" y="${y(r)}" width="${size}"
    height="${size}" fill="none" stroke="#1f2933" stroke-width="2.5"/>`;
  if (i >= s.chunks) svg += `<text x="${x(s, i) + size / 2}" y="${y(r) + 19}"
    text-anchor="middle" style="fill:#fff">${value[0]}</text>`;
  return svg;
}
function arrow(s, [from, to, chunk, count]) {
  const middle = x(s, chunk) + ((count - 1) * (size + 4) + size) / 2;
  const a = y(from) + size / 2, b = y(to) + size / 2, bend = 14 + 5 * Math.abs(from - to);
  return `<path d="M${middle} ${a} Q${middle + bend} ${(a + b) / 2} ${middle} ${b}" fill="none"
    stroke="#1f2933" stroke-width="${count > 1 ? 2.6 : 1.5}" marker-end="url(#tip)"/>`;
}
function draw(s, step) {
  step = Math.min(step, s.cells.length - 1);
  const wide = x(s, s.chunks + s.slots) + 40, high = y(s.n) + 4;
  let svg = `<svg width="${wide}" height="${high}" viewBox="0 0 ${wide} ${high}"><defs>
    <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"
    orient="auto"><path d="M0 0L8 4L0 8z" fill="#1f2933"/></marker></defs>`;
  for (let i = 0; i < s.chunks; i++)
    svg += `<text x="${x(s, i) + size / 2}" y="14" text-anchor="middle">${i}</text>`;
  for (let r = 0; r < s.n; r++) {
    svg += `<text x="0" y="${y(r) + 19}">rank ${r}</text>`;
    s.cells[step][r].forEach((_, i) => svg += cell(s, step, r, i));
  }
  s.arrows[step].forEach(a => svg += arrow(s, a));
  return `<section><h2>${s.title}</h2><p>${s.figures}</p>${svg}</svg></section>`;
}
let now = 0, timer = null;
function show(step) {
  now = Math.max(0, Math.min(most, step));
  el("all").innerHTML = all.map(s => draw(s, now)).join("");
  el("at").value = now;
  el("where").textContent = now ? `after round ${now - 1}` : "at the start";
}
function stop() { clearInterval(timer); timer = null; el("play").textContent = "play"; }
function play() {
  if (timer) return stop();
  if (now === most) show(0);
  el("play").textContent = "stop";
  timer = setInterval(() => now < most ? show(now + 1) : stop(), 900);
}
el("at").max = most;
el("at").oninput = e => show(+e.target.value);
el("back").onclick = () => show(now - 1);
el("next").onclick = () => show(now + 1);
el("play").onclick = play;
document.onkeydown = e => {
  if (e.target.id === "at") return;
  if (e.key === "ArrowRight") show(now + 1);
  if (e.key === "ArrowLeft") show(now - 1);
};
el("key").innerHTML = [...Array(ranks).keys()].map(r =>
  `<span><i style="background:${colour(r)}"></i>rank ${r}</span>`).join(" ");
show(+(location.hash.slice(1) || 0));
</script></body></html>
"""
