"""How many elements' bits an all-reduce makes depend on the size of the call.

    python benchmarks/same_bits.py                       # pycoll and gloo; NCCL where devices are
    python benchmarks/same_bits.py --mpi .venv-mpich .venv-openmpi --ranks 2 3 4 8

It runs in an environment with PyTorch; those of ``--mpi`` have an MPI and mpi4py, for the same
Python.

Every rank has a vector of random numbers. It is summed in one call; then its beginning in calls of
other sizes, stretches of it from other offsets, all of it in chunks, and as gradients that DDP puts
into buckets of other sizes. The page counts the elements of which some such call gives other bits
than the one call. It writes benchmarks/results/same_bits.md and .json.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np

SIZES = (1, 7, 64, 1000, 4096, 40_001, 262_144)  # elements of a call from the beginning
OFFSETS = (1, 3, 16, 1000, 100_003)  # where a call begins that takes half of the vector
CHUNKS = (4099, 65_536, 300_001)  # elements of each call of those that take all of it
CAPS = (0.05, 0.5, 2, 1000)  # MiB of a bucket of DDP; the last one holds everything
DTYPES = ("float32", "bfloat16", "float16")
WAYS = ("size", "offset", "chunking", "bucket cap")
TORCH = {"pycoll": "pycoll", "pycoll, TCP": "pycoll", "gloo": "gloo", "NCCL": "nccl"}
MPI_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
TIMEOUT_S = 900
ABOUT = (
    "The shares of the elements of which the bits of the sum depend on the call: on its size, "
    "where it begins, the size of the chunks in which the vector is summed, and the size of DDP's "
    "buckets. mpi4py reduces neither bfloat16 nor float16"
)


def vector(rank, count):
    """Return numbers of several magnitudes, whose sums round."""
    rng = np.random.default_rng(rank)
    return (rng.standard_normal(count) * np.exp2(rng.integers(-4, 4, count))).astype(np.float32)


def count_differences(sum_of, x):
    """Return a mask of the elements that differ, for each way in which calls differ.

    Args:
        sum_of: Returns the bits of the sum of an array of all ranks.
        x: The vector of this rank.
    """
    whole, n = sum_of(x), len(x)
    masks = {way: np.zeros(n, bool) for way in WAYS[:3]}
    for k in SIZES:
        masks["size"][:k] |= sum_of(x[:k]) != whole[:k]
    for start in OFFSETS:
        part = slice(start, start + n // 2)
        masks["offset"][part] |= sum_of(x[part]) != whole[part]
    for k in CHUNKS:
        for start in range(0, n, k):
            part = slice(start, start + k)
            masks["chunking"][part] |= sum_of(x[part]) != whole[part]
    return masks


def ddp_differences(x):
    """Return a mask of the gradients that depend on the size of DDP's buckets."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    sizes = [k for k in (1000, 37, 12_289, 1, 65_536) for _ in range(len(x) // 400_000 + 1)]
    sizes.append(len(x) - sum(sizes))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            parts = [
                torch.nn.Parameter(torch.zeros(k, dtype=x.dtype, device=x.device)) for k in sizes
            ]
            self.parts = torch.nn.ParameterList(parts)

        def forward(self):
            return sum(
                (p.float() * g.float()).sum()
                for p, g in zip(self.parts, x.split(sizes), strict=False)
            )

    def gradients(cap):
        model = DistributedDataParallel(Model(), bucket_cap_mb=cap)
        for _ in range(2):  # buckets are made anew after the first step
            model.zero_grad()
            model().backward()
        return bits(torch.cat([p.grad for p in model.parameters()]))

    whole = gradients(CAPS[-1])
    return np.any([gradients(cap) != whole for cap in CAPS[:-1]], axis=0)


def bits(x):
    """Return the bits of a tensor as integers."""
    import torch

    return x.cpu().view({4: torch.int32, 2: torch.int16}[x.element_size()]).numpy()


def shares(masks):
    return {
        "elements": len(masks["size"]),
        **{way: mask.mean() for way, mask in masks.items()},
        "any": np.any([*masks.values()], 0).mean(),
    }


def rank_of_torch(name, count):
    """Measure a backend of torch.distributed; a rank started by torchrun or mpiexec."""
    import torch
    import torch.distributed as dist

    import pycoll.torch  # noqa: F401 - registers the backend
    from pycoll.runtime.startup.hosts import Card

    if "RANK" not in os.environ:  # mpiexec has another name for it
        os.environ["RANK"] = next(os.environ[name] for name in MPI_RANKS if name in os.environ)
    rank, device, by_messages = int(os.environ["RANK"]), "cpu", name.startswith("pycoll, ")
    torch.set_num_threads(1)
    if by_messages:  # every rank takes itself to be on a host of its own
        real = Card.own()
        Card.own = classmethod(lambda cls: replace(real, host=f"{real.host} {rank}"))
    if name == "NCCL":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(TORCH.get(name, "pycoll"), timeout=timedelta(seconds=TIMEOUT_S))
    if by_messages:
        transport = dist.group.WORLD._caller.session.transport
        assert ("TCP" in transport) == (name in TORCH), transport
    found = {}
    for dtype in DTYPES:
        x = torch.from_numpy(vector(rank, count)).to(getattr(torch, dtype)).to(device)

        def sum_of(part):
            y = part.clone()
            dist.all_reduce(y)
            return bits(y)

        masks = count_differences(sum_of, x)
        found[dtype] = shares({**masks, "bucket cap": ddp_differences(x)})
    dist.destroy_process_group()
    return rank, found


def rank_of_mpi(name, count):
    """Measure an MPI through mpi4py; a rank started by mpiexec."""
    from mpi4py import MPI

    def sum_of(part):
        out = np.empty_like(part)
        MPI.COMM_WORLD.Allreduce(np.ascontiguousarray(part), out)
        return out.view("i4")

    rank = MPI.COMM_WORLD.rank
    return rank, {"float32": shares(count_differences(sum_of, vector(rank, count)))}


def launch(name, n, count, home=None):
    """Start the ranks of a library; return what rank 0 has found.

    Args:
        name: The library.
        n: Number of ranks.
        count: Elements of the vector.
        home: The environment of an MPI; None without one.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        paths = [str(Path(__file__).resolve().parents[1])]
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        if home is None:
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            start += [f"--nproc-per-node={n}"]
        else:
            more = ["--oversubscribe"] if Path(home, "bin/prterun").exists() else []  # Open MPI
            start = [f"{home}/bin/mpiexec", "-n", str(n), *more, sys.executable]
            paths.append(str(next(Path(home).resolve().glob("lib/python*/site-packages"))))
            variables |= {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29547"}
            variables |= {"MPI4PY_LIBMPI": str(min(Path(home).resolve().glob("lib/libmpi.so.*")))}
        words = [str(Path(__file__).resolve()), "--rank", name, str(count), str(out)]
        variables |= {"PYTHONPATH": os.pathsep.join(paths)}
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(
            [*start, *words], capture_output=True, text=True, timeout=TIMEOUT_S, env=variables
        )
        if done.returncode:
            raise SystemExit(f"{name} on {n} ranks failed:\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text())


def percent(share):
    """Return a share in words: nothing at all is 0, and what rounds to that is not."""
    if share is None:
        return ""
    return "0" if share == 0 else f"{100 * share:.1f} %" if share >= 0.001 else "< 0.1 %"


def rows(found):
    for name, by_n in found.items():
        for n, by_dtype in by_n.items():
            for dtype, result in by_dtype.items():
                cells = (percent(result.get(way)) for way in (*WAYS, "any"))
                yield [name, n, dtype, f"{result['elements']:,}", *cells]


def devices():
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def main():
    from harness import pages

    parser = pages.arguments(__doc__, "same_bits")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--elements", type=int, default=1_000_003)
    parser.add_argument("--only", nargs="*", help="names of libraries", default=[*TORCH])
    parser.add_argument("--mpi", nargs="*", default=[], help="environments with mpi4py")
    parser.add_argument("--keep", action="store_true", help="add to what the page has")
    args = parser.parse_args()
    runs = [(name, None) for name in TORCH if name in args.only]
    for home in args.mpi:
        library = Path(home).name.removeprefix(".venv-")
        runs += [(f"{library} (mpi4py)", home), (f"pycoll, {library}", home)]
    before = pages.RESULTS / f"{args.name}.json"
    found = json.loads(before.read_text())["found"] if args.keep and before.exists() else {}
    for name, home in runs:
        for n in args.ranks:
            if name == "NCCL" and devices() < n:
                continue
            print(f"{name}, {n} ranks", file=sys.stderr)
            found.setdefault(name, {})[str(n)] = launch(name, n, args.elements, home)
            head = ["library", "ranks", "type", "elements", *WAYS, "any of them"]
            lines = pages.table(head, rows(found))
            pages.write(args.name, "Bits that depend on the call", ABOUT, lines, found=found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _, _, name, count, out = sys.argv
        kind = rank_of_mpi if name.endswith("(mpi4py)") else rank_of_torch
        rank, found = kind(name, int(count))
        if rank == 0:
            Path(out).write_text(json.dumps(found, default=float))
    else:
        main()
