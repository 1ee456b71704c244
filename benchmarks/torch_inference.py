"""Compare the calls of pycoll.torch that servers make with the same over gloo.

``python benchmarks/torch_inference.py`` takes about a minute on two idle cores. All ways live in
the same processes and take turns, in short slices; what counts is the median of the ratios.
"decode" is what tensor parallelism adds to one step: seven all_reduces of bfloat16. "moe" is
dispatch and combine of a mixture of experts, the experts themselves left out:
`pycoll.torch.inference`; over gloo, an all_gather of all tokens, of which a rank takes the rows of
its experts, and a sum of the weighted results of all ranks; and over gloo, all_to_all_single of
just the rows that are wanted, whose numbers are exchanged first. Their results are compared before.
It prints a table and writes
benchmarks/results/torch_inference.md and .json.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from harness import pages

import pycoll.torch  # noqa: F401 - registers the backend
from pycoll.torch.inference import combine, dispatch

SLICE_S = 0.01  # of one way's turn
DECODE_KIB = (4, 16, 64, 8, 32, 64, 4)
MOE = [(1, 1024, 2), (8, 1024, 2), (32, 2048, 4), (256, 2048, 4)]  # tokens of a rank, hidden, k
EXPERTS = 16


def decode(group):
    """Return the all_reduces of one step."""
    vectors = [torch.zeros(kib << 9, dtype=torch.bfloat16) for kib in DECODE_KIB]

    def step():
        for x in vectors:
            dist.all_reduce(x, group=group)

    return step


def tokens(rank, n, hidden, k):
    made = torch.Generator().manual_seed(rank)
    x = torch.randn(n, hidden, generator=made).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=made)[:k] for _ in range(n)])
    return x, ids, torch.rand(n, k, generator=made)


def by_pycoll(group, x, ids, weights):
    def step():
        sent = dispatch(x, ids, weights, EXPERTS, group=group)
        return combine(sent.rows, sent)

    return step


def by_gathering(group, x, ids, weights):
    """Every rank gets all tokens, and adds its experts' results of each; then they are summed."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    first, last = rank * EXPERTS // n, (rank + 1) * EXPERTS // n

    def gather(t):
        out = t.new_empty(n * t.shape[0], t.shape[1])
        dist.all_gather(list(out.chunk(n)), t, group=group)
        return out

    def step():
        everything, chosen, factors = gather(x), gather(ids).view(-1), gather(weights).view(-1)
        by_expert = chosen.argsort(stable=True)
        bounds = torch.searchsorted(chosen[by_expert], torch.tensor([first, last]))
        mine = by_expert[bounds[0] : bounds[1]]
        senders = mine // ids.shape[1]
        rows = everything[senders]  # what the experts get, and in this benchmark return
        share = everything.new_zeros(everything.shape, dtype=torch.float32)
        share.index_add_(0, senders, rows.float() * factors[mine, None])
        share = share.bfloat16()
        dist.all_reduce(share, group=group)  # gloo has no reduce_scatter of tensors of its own
        return share.chunk(n)[rank]

    return step


def by_rows(group, x, ids, weights):
    """Send just the rows that are wanted, and their results back."""
    n = dist.get_world_size(group)

    def step():
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent, got = (c.view(n, -1).sum(1).tolist() for c in (counts, theirs))
        rows = x.new_empty(sum(got), x.shape[1])
        dist.all_to_all_single(rows, x[order // ids.shape[1]], got, sent, group=group)
        back = x.new_empty(len(flat), x.shape[1])
        dist.all_to_all_single(back, rows, sent, got, group=group)
        routes = torch.empty_like(back)
        routes[order] = back
        return (routes.view(*ids.shape, -1).float() * weights.unsqueeze(-1)).sum(1).bfloat16()

    return step


def timed(step, count, group):
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def contest(ways, rounds, group):
    """Let ways take turns; return seconds a call in each round, the same on every rank."""
    counts = []
    for step in ways:
        step()
        guess = torch.tensor([timed(step, 3, group)], dtype=torch.float64)
        dist.broadcast(guess, 0, group=group)
        counts.append(max(1, min(500, round(SLICE_S / guess.item()))))
    found = [[timed(s, c, group) for s, c in zip(ways, counts, strict=True)] for _ in range(rounds)]
    return [list(times) for times in zip(*found, strict=True)]


def measure(rank, n, path, rounds, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, n), rank=rank, world_size=n)
    gloo, ours = dist.group.WORLD, dist.new_group(backend="pycoll")
    names = ["pycoll", "gloo"]
    cells = [("decode", "", names, contest([decode(ours), decode(gloo)], rounds, gloo))]
    for shape in MOE:
        given = tokens(rank, *shape)
        ways = [by_pycoll(ours, *given), by_gathering(gloo, *given), by_rows(gloo, *given)]
        results = [step().float() for step in ways]
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=0.05, atol=0.1)
        names = ["pycoll", "gloo, all_gather", "gloo, all_to_all_single"]
        text = f"{shape[0]} tokens a rank of {shape[1]}, {shape[2]} of {EXPERTS} experts"
        cells.append(("moe", text, names, contest(ways, rounds, gloo)))
    if rank == 0:
        out.write_text(json.dumps(cells))
    dist.destroy_process_group()


def rows_of(cells):
    for what, text, names, (ours, *others) in cells:
        for name, theirs in zip(names[1:], others, strict=True):
            ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
            us = [f"{statistics.median(t) * 1e6:.0f} us" for t in (ours, theirs)]
            best = [f"{min(t) * 1e6:.0f} us" for t in (ours, theirs)]
            yield [what, text, name, *us, f"{ratio:.1f}", " / ".join(best)]


def main():
    parser = pages.arguments(__doc__, "torch_inference")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        job = args.ranks, str(Path(folder) / "store"), args.rounds, found
        torch.multiprocessing.spawn(measure, job, nprocs=args.ranks)
        cells = json.loads(found.read_text())
    step = min(cells[0][3][0]) * 1e6 / len(DECODE_KIB)
    about = (
        f"PyTorch {torch.__version__}, {args.ranks} ranks of one thread each; load of the "
        f"machine {os.getloadavg()[1]:.1f}, of which {args.ranks} is this. An all_reduce of the "
        f"decode step took {step:.1f} us in the quickest slice"
    )
    head = ["what", "of", "beside", "pycoll", "the other", "times faster", "the quickest slices"]
    lines = pages.table(head, rows_of(cells))
    pages.write(args.name, "Calls of servers beside gloo", about, lines, cells=cells)


if __name__ == "__main__":
    main()
