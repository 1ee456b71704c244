"""Compare pycoll with gloo below torch.distributed: single operations, and training steps.

``python benchmarks/torch_ddp.py`` takes about three minutes on two idle cores. Both backends live
in the same two processes and are timed in turn, in short slices; what counts is the median of the
ratios. Where others use the cores too, the quickest slices tell more. Communication of a training
step is what it takes longer than the same step whose messages are left out, timed right before it;
"symmetric" is `pycoll.torch.use_symmetric_memory`, which DDP has by itself, and FSDP2 if it is
asked for; "one pass", of DDP, a hook that reads and writes the gradients once and neither sends nor
waits. It prints a table and writes benchmarks/results/torch.md and .json.
"""

import functools
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from harness import pages
from harness.pages import size
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - the backend "fake"

import pycoll.torch

RANKS = 2
SLICE_S = 0.005  # of one contestant's turn
STEPS = 3  # training steps of a turn
SIZES = [8, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20]
GATHERED = [64 << 10, 1 << 20, 16 << 20]
WIDTHS = (1024, 2048, 2048, 2048, 2048, 2048, 2048, 1024)  # 25 million parameters
UNCHANGED = {"ddp_step": "symmetric", "fsdp_step": "pycoll"}  # what programs get by themselves


def ping_pong(x, group):
    """Send x from rank 0 to rank 1, and back."""
    rank = dist.get_rank()
    for receive in (rank == 1, rank == 0):
        (dist.recv if receive else dist.send)(x, 1 - rank, group=group)


def parts(x):
    return list(x.chunk(RANKS))


def scatter(out, given, group):
    dist.scatter(out, given if dist.get_rank() == 0 else None, 0, group=group)


# By name: the call, given the whole vector, another one, and one of the parts of both.
CALLS = {
    "all_reduce": lambda x, out, part, g: dist.all_reduce(x, group=g),
    "all_gather": lambda x, out, part, g: dist.all_gather_into_tensor(out, part, group=g),
    "reduce_scatter": lambda x, out, part, g: dist.reduce_scatter_tensor(part, x, group=g),
    "broadcast": lambda x, out, part, g: dist.broadcast(x, 0, group=g),
    "all_to_all": lambda x, out, part, g: dist.all_to_all_single(out, x, group=g),
    "ping_pong": lambda x, out, part, g: ping_pong(x, g),
    "barrier": lambda x, out, part, g: dist.barrier(g),
    "all_gather_list": lambda x, out, part, g: dist.all_gather(parts(out), part, group=g),
    "scatter_list": lambda x, out, part, g: scatter(part, parts(x), g),
}
OPERATIONS = [("all_reduce", nbytes) for nbytes in SIZES]
OPERATIONS += [(n, b) for n in ("all_gather", "reduce_scatter", "broadcast") for b in GATHERED]
OPERATIONS += [("all_to_all", 1 << 20), ("ping_pong", 8), ("ping_pong", 1 << 20), ("barrier", 0)]
OPERATIONS += [(name, n << 20) for name in ("all_gather_list", "scatter_list") for n in (1, 16, 64)]


def call_of(name, group, nbytes):
    """Return a call of an operation without arguments."""
    x, out = torch.zeros(nbytes // 4), torch.empty(nbytes // 4)
    part = torch.zeros(nbytes // 4 // RANKS)
    return functools.partial(CALLS[name], x, out, part, group)


def model():
    torch.manual_seed(0)
    pairs = itertools.pairwise(WIDTHS)
    return nn.Sequential(*[layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())])


def step_of(net):
    x = torch.randn(8, WIDTHS[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step():
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def send_nothing(
    state: object, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:  # DDP asks for these annotations
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def pass_once(
    state: object, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:  # what no all-reduce on these cores can do without
    bucket.buffer().div_(RANKS)
    return send_nothing(state, bucket)


def ddp_step(group, symmetric=False, hook=send_nothing):
    net = DistributedDataParallel(model(), process_group=group)
    if dist.get_backend(group) == "fake":
        net.register_comm_hook(None, hook)
    return step_of(pycoll.torch.use_symmetric_memory(net) if symmetric else net)


def fsdp_step(group, symmetric=False):
    net, mesh = model(), DeviceMesh.from_group(group, "cpu")
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    net = fully_shard(net, mesh=mesh)
    return step_of(pycoll.torch.use_symmetric_memory(net) if symmetric else net)


def plain_step(group):
    return step_of(model())


def timed(call, count):
    """Return the seconds of one call; of the slower rank.

    The barrier is gloo's and wakes the ranks at different moments, maybe on one core: before the
    clock starts they make a tenth of the calls to come out of that.
    """
    dist.barrier()
    for _ in range(count // 10):
        call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = torch.tensor((time.perf_counter() - start) / count)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def duel(contestants, rounds, least=1):
    """Time calls in turn; return a list of seconds for each."""
    counts = []
    for call in contestants:
        call()
        tries = 3 if timed(call, 3) > SLICE_S / 10 else 100
        counts.append(max(least, min(2000, round(SLICE_S / timed(call, tries)))))
    times = [[] for _ in contestants]
    for _ in range(rounds):
        for call, count, found in zip(contestants, counts, times, strict=True):
            found.append(timed(call, count))
    return times


def row(name, nbytes, gloo, ours):
    ratios = [g / p for g, p in zip(gloo, ours, strict=True)]
    return {
        "operation": name,
        "nbytes": nbytes,
        "gloo_us": statistics.median(gloo) * 1e6,
        "pycoll_us": statistics.median(ours) * 1e6,
        "gloo_best_us": min(gloo) * 1e6,
        "pycoll_best_us": min(ours) * 1e6,
        "ratio": statistics.median(ratios),
    }


def step_row(make, groups, idle, rounds):
    """Time a training step; communication is what it costs beyond calls that move nothing."""
    contestants = {"silent": make(idle), "gloo": make(groups[0]), "pycoll": make(groups[1])}
    contestants |= {"symmetric": make(groups[1], symmetric=True), "plain": plain_step(None)}
    if make is ddp_step:
        contestants["pass"] = make(idle, hook=pass_once)
    times = duel(list(contestants.values()), rounds, least=STEPS)
    found = {"operation": make.__name__, "nbytes": 4 * sum(p.numel() for p in model().parameters())}
    silent = times[0]
    for name, own in zip(contestants, times, strict=True):
        found[f"{name}_us"] = statistics.median(own) * 1e6
        extra = [(t - s) * 1e6 for t, s in zip(own, silent, strict=True)]
        found[f"{name}_extra_us"] = statistics.quantiles(extra, n=4)
    return found


def measure(rank, path, rounds, step_rounds, out):
    os.environ["PYCOLL_DDP_SYMMETRIC"] = "0"  # "symmetric" asks for what DDP has without it
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, RANKS), rank=rank, world_size=RANKS)
    groups = [dist.group.WORLD, dist.new_group(backend="pycoll")]
    operations = []
    for name, nbytes in OPERATIONS:
        gloo, ours = duel([call_of(name, group, nbytes) for group in groups], rounds)
        operations.append(row(name, nbytes, gloo, ours))
    idle = dist.new_group(backend="fake")
    alone = [dist.new_group([r], backend="pycoll") for r in range(RANKS)][rank]
    floor = duel([call_of("all_reduce", group, 8) for group in (idle, alone)], rounds)
    floor = [statistics.median(times) * 1e6 for times in floor]
    steps = [step_row(make, groups, idle, step_rounds) for make in (ddp_step, fsdp_step)]
    if rank == 0:
        found = {"operations": operations, "floor_us": floor, "steps": steps}
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def milliseconds(quartiles):
    low, middle, high = (us / 1e3 for us in quartiles)
    return f"{middle:.1f} ms ({low:.1f} to {high:.1f})"


def operations_table(rows):
    head = ["operation", "size", "gloo", "pycoll", "times faster", "the quickest slices"]
    lines = []
    for r in rows:
        best, ours = r["gloo_best_us"], r["pycoll_best_us"]
        us = [f"{r[f'{name}_us']:.1f} us" for name in ("gloo", "pycoll")]
        quickest = f"{best:.1f} us / {ours:.1f} us = {best / ours:.1f}"
        lines.append([r["operation"], size(r["nbytes"]), *us, f"{r['ratio']:.1f}", quickest])
    return pages.table(head, lines)


def steps_table(rows):
    names = ("gloo", "pycoll", "symmetric", "silent", "plain")
    head = ["training step", "gloo", "pycoll, ordinary memory", "symmetric", "no messages"]
    head += ["no wrapper"]
    lines = []
    for r in rows:
        times = [f"{r[f'{name}_us'] / 1e3:.1f} ms" for name in names]
        lines.append([f"{r['operation']}, {size(r['nbytes'])} of parameters", *times])
    return pages.table(head, lines)


def communication_table(rows):
    head = ["communication of a step", "gloo", "pycoll, ordinary memory", "times faster"]
    head += ["symmetric", "faster", "one pass", "at most", "of gloo's, without a change"]
    lines = []
    for r in rows:
        cells = [r["operation"], milliseconds(r["gloo_extra_us"])]
        for name in ("pycoll", "symmetric", "pass"):
            own = r.get(f"{name}_extra_us")
            if own is None:
                cells += ["", ""]
                continue
            lost = own[1] < 0.02 * r["silent_us"]  # less than that is lost in the noise
            faster = "-" if lost else f"{r['gloo_extra_us'][1] / own[1]:.1f}"
            cells += [milliseconds(own), faster]
        unchanged = r[f"{UNCHANGED[r['operation']]}_extra_us"][1]
        lines.append([*cells, f"{unchanged / r['gloo_extra_us'][1]:.1%}"])
    return pages.table(head, lines)


def main():
    parser = pages.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=61, help="of the operations")
    parser.add_argument("--steps", type=int, help="rounds of the training steps; a fourth of those")
    parser.add_argument("--out", type=Path, default=pages.RESULTS)
    args = parser.parse_args()
    steps = args.steps or max(3, args.rounds // 4)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(measure, (store, args.rounds, steps, found), nprocs=RANKS)
        result = json.loads(found.read_text())
    facts = pages.facts()
    facts["machine"] |= {"torch": torch.__version__, "load": os.getloadavg()[1]}
    about = (
        f"PyTorch {torch.__version__}. Two ranks, one thread each; load of the machine "
        f"{facts['machine']['load']:.1f}, of which 2 is this."
    )
    nothing, alone = result["floor_us"]
    floor = (
        f"`all_reduce` of 8 B, and nobody to wait for: {alone:.1f} us. A backend of PyTorch's that "
        f"does nothing takes {nothing:.1f} us."
    )
    lines = [*operations_table(result["operations"]), "", floor, ""]
    lines += [*steps_table(result["steps"]), "", *communication_table(result["steps"])]
    lines += ["", "In brackets: the middle half of the rounds."]
    pages.write(args.out / "torch", "pycoll.torch beside gloo", about, lines, facts, **result)


if __name__ == "__main__":
    main()
