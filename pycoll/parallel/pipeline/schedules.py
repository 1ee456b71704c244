"""Schedules that flush: all micro-batches of a step are over before parameters change.

Costs are in units of a forward pass of one stage, for F, B and W that take one each. The *bubble*
is the part of a step in which a stage waits; what a schedule states of it, which is proven, is in
units of one chunk. A stage sends the gradient of its input after B,
before W; where the two are one, as in automatic differentiation, 2 (p - 1) becomes 3 (p - 1).
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.parallel.pipeline.program import B, F, Op, Schedule, W, pipeline


@pipeline("naive", live=lambda stage, p, m: 1, bubble=lambda p, m: 2 * m * (p - 1))
def naive(stage: int, p: int, m: int) -> Iterator[Op]:
    """One micro-batch at a time, through all stages and back: model parallelism, no pipeline.

    Cost: bubble 2 m (p - 1); 1 live activation.
    """
    for i in range(m):
        yield from (F(i), B(i), W(i))


@pipeline("gpipe", live=lambda stage, p, m: m, bubble=lambda p, m: 2 * (p - 1))
def gpipe(stage: int, p: int, m: int) -> Iterator[Op]:
    """All forward passes, then all backward passes.

    Backward passes come in the order of the forward passes, so that gradients are added as one
    process adds them.

    Cost: bubble 2 (p - 1); m live activations.
    Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3.
    """
    for i in range(m):
        yield F(i)
    for i in range(m):
        yield from (B(i), W(i))


@pipeline("1f1b", live=lambda stage, p, m: min(p - stage, m), bubble=lambda p, m: 2 * (p - 1))
def one_f_one_b(stage: int, p: int, m: int) -> Iterator[Op]:
    """A backward pass after each forward pass, as soon as there is one.

    Cost: bubble 2 (p - 1); p - stage live activations.
    Source: Narayanan et al., "... on GPU clusters using Megatron-LM", SC 2021, section 2.2.1.
    """
    ahead = min(p - stage - 1, m)
    yield from map(F, range(ahead))
    for i in range(m):
        if ahead + i < m:
            yield F(ahead + i)
        yield from (B(i), W(i))


def interleaved(chunks: int = 2) -> Schedule:
    """Return the schedule for a number of chunks of a stage: a smaller bubble, more transfers.

    Cost: bubble 2 (p - 1) / chunks, if p divides m; chunks times the transfers. Where micro-batches
    are missing to a multiple of p, their places may be empty.
    Source: Narayanan et al., SC 2021, section 2.2.2.
    """

    def live(stage: int, p: int, m: int) -> float:
        return min(2 * (p - stage - 1) + (chunks - 1) * p + 1, m * chunks) / chunks

    def bubble(p: int, m: int) -> float:
        return 2 * (p - 1) + 3 * chunks * (-m % p)

    @pipeline(f"interleaved:{chunks}", live=live, bubble=bubble, chunks=chunks, pad=lambda p: p)
    def order(stage: int, p: int, m: int) -> Iterator[Op]:
        def at(k: int, backward: bool) -> tuple[int, int]:
            group, rest = divmod(k, p * chunks)
            chunk, i = divmod(rest, p)
            return group * p + i, chunks - 1 - chunk if backward else chunk

        total = m * chunks
        ahead = min(2 * (p - stage - 1) + (chunks - 1) * p, total)
        for k in range(ahead):
            yield F(*at(k, False))
        for k in range(total):
            if ahead + k < total:
                yield F(*at(ahead + k, False))
            place = at(k, True)
            yield from (B(*place), W(*place))

    return order


@pipeline(
    "zb_h1",
    live=lambda stage, p, m: min(p, m),
    bubble=lambda p, m: p - 1 + max(0, p - m),
)
def zb_h1(stage: int, p: int, m: int) -> Iterator[Op]:
    """1F1B whose gradients of parameters wait for a time in which the stage has nothing to do.

    Stage s may be s gradients of parameters behind, so that it holds as much as stage 0 does.

    Cost: bubble p - 1, and p - m more if m < p; p live activations.
    Source: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.1, ZB-H1.
    """
    ahead, done = min(p - stage - 1, m), 0
    yield from map(F, range(ahead))
    for i in range(m):
        if ahead + i < m:
            yield F(ahead + i)
        yield B(i)
        if i >= stage:
            yield W(done)
            done += 1
    yield from map(W, range(done, m))


def _bubble_of_zb_v(p: int, m: int) -> float:
    few = max(0, 3 * p - 2 * m) if m > p else 2 * (p - m) + max(0, p - 2 * m)
    return p - 1 + few


@pipeline(
    "zb_v",
    live=lambda stage, p, m: min(p, m),
    layout="vee",
    chunks=2,
    rule=True,
    bubble=_bubble_of_zb_v,
)
def zb_v(op: Op) -> tuple:
    """Two chunks a stage, down and up again: forward while there is room, weights last.

    Of two micro-batches the older one comes first, of its two chunks the later one.

    Cost: bubble (p - 1) / 2, if m = p or m >= 3 p / 2; p live activations.
    Source: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 6, ZB-V; the order
    comes from the rule instead of a table.
    """
    return "FBW".index(op.kind), op.micro, -op.chunk


def _bubble_of_dualpipe_v(p: int, m: int) -> float:
    return min(2 * (p - 1), p - 1 + 2 * (-m % (2 * p))) + 2 * max(0, p - m)


@pipeline(
    "dualpipe_v",
    live=lambda stage, p, m: min(p + 0.5, m),
    layout="vee",
    chunks=2,
    pad=lambda p: 2 * p,
    bubble=_bubble_of_dualpipe_v,
)
def dualpipe_v(stage: int, p: int, m: int) -> Iterator[Op]:
    """Two chunks a stage, a forward pass of one beside a backward pass of the other.

    Cost: bubble (p - 1) / 2, if 2 p divides m, else up to p - 1; p + 1/2 live activations.
    Source: DeepSeek-AI, "DualPipe", 2025, README; Qi et al., "DualPipe could be better without the
    dual", 2025.
    """
    count = {(kind, chunk): 0 for kind in "FBW" for chunk in (0, 1)}

    def one(kind: str, chunk: int) -> Op:
        count[kind, chunk] += 1
        return Op(kind, count[kind, chunk] - 1, chunk)

    def whole(chunk: int) -> tuple[Op, Op]:
        return one("B", chunk), one("W", chunk)

    def owed() -> Op:
        chunk = 1 if count["W", 1] < count["B", 1] else 0
        return one("W", chunk)

    for _ in range(2 * (p - stage - 1)):
        yield one("F", 0)
    for _ in range(stage + 1):
        yield from (one("F", 0), one("F", 1))
    for _ in range(p - stage - 1):
        yield from (*whole(1), one("F", 1))
    for _ in range(m - 2 * p + stage + 1):
        yield from (one("F", 0), *whole(1), one("F", 1), *whole(0))
    for _ in range(p - stage - 1):
        yield from (*whole(1), one("F", 1), *whole(0))
    late = False
    for i in range(stage + 1):
        for chunk in (1, 0):
            late = late or (2 * i + (chunk == 0)) >= 2 * ((stage + 1) // 2) + (stage % 2 == 0)
            if late:
                yield one("B", chunk)
            else:
                yield from whole(chunk)
    for _ in range(p - stage - 1):
        yield from (owed(), one("B", 0))
    while count["W", 0] < m:
        yield owed()
