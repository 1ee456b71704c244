"""What ranks get when one of them differs, or is gone: pycoll, MPICH, Open MPI and gloo.

``python benchmarks/failures.py`` takes some minutes, nearly all of it waiting for those that
hang. Of three ranks one makes another call, or dies, or never comes. Every case is run in fresh
processes. It prints a table and writes benchmarks/results/failures.md and .json. The libraries are
installed as compare.py does it.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from failures_ranks import ODD, WAIT_S
from harness import pages

sys.path.insert(0, str(Path(__file__).with_name("compare")))

import launch

N = 3
START_S = 60
PATIENCE_S = 3 * WAIT_S  # after that a rank that still waits hangs
NAMES = ("pycoll", "pycoll over MPICH", "pycoll over Open MPI", "MPICH", "Open MPI", "gloo")
DIFFER = ("number of elements", "data type", "operation", "root", "collective")
GONE = {"killed": "it is killed", "exits": "it exits", "never comes": "it never comes"}


def play(name, case):
    """Run a case; return what became of each rank.

    That is what it wrote, None if it ended without that, and "waits" if it did neither.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        program = [str(Path(__file__).with_name("failures_ranks.py")), case, name, place]
        processes = launch.start(name, N, program, folder / "output")
        files = [folder / f"{rank}.json" for rank in range(N)]
        wanted = [f for rank, f in enumerate(files) if case in DIFFER or rank != ODD]
        pids = [f.with_suffix(".pid") for f in files]
        if not until(lambda: all(f.exists() for f in pids), processes, START_S):
            raise SystemExit(f"{name} did not start:\n{(folder / 'output').read_text()}")
        until(lambda: all(f.exists() for f in wanted), processes, PATIENCE_S)
        time.sleep(0.2)  # what has begun to be written is whole by then
        pids = [int(f.read_text()) for f in pids]
        found = [_outcome(f, pid) for f, pid in zip(files, pids, strict=True)]
        for pid in pids:  # launchers put them into groups of their own
            if _lives(pid):
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return found


def until(done, processes, seconds):
    """Wait until it is done, or all processes have ended; return whether it is."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end and any(p.poll() is None for p in processes):
        time.sleep(0.05)
    return done()


def _lives(pid):
    """Return whether a process is there, and is more than a record of its end."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def _outcome(file, pid):
    if file.exists():
        return json.loads(file.read_text())
    return "waits" if _lives(pid) else None


def verdict(found, case):
    """Say in a few words what became of the ranks that were not to go."""
    ranks = [f for rank, f in enumerate(found) if case in DIFFER or rank != ODD]
    errors = [f for f in ranks if isinstance(f, dict) and f["error"]]
    silent = [f for f in ranks if isinstance(f, dict) and not f["error"]]
    waiting, ended = ranks.count("waits"), ranks.count(None)
    if len(errors) == len(ranks):
        last = max(f["seconds"] for f in errors)
        return f"error on every rank, {f'{last:.1f} s' if last >= 1 else f'{1000 * last:.0f} ms'}"
    if len(silent) == len(ranks):
        return "**no error, wrong numbers**" if case in DIFFER else "**no error**"
    if ended == len(ranks):
        return "all processes are ended"
    parts = [(errors, "error"), (silent, "**no error, wrong numbers**")]
    texts = [f"{text} on {len(some)}" for some, text in parts if some]
    texts += [f"{ended} aborted"] if ended else []
    texts += [f"**{waiting} hang**"] if waiting else []
    return ", ".join(texts)


def table(results):
    names = list(results)
    lines = []
    for case in (*DIFFER, *GONE):
        lines.append([GONE.get(case, case), *(verdict(results[n][case], case) for n in names)])
    return pages.table(["what differs on one rank of three", *names], lines)


def main():
    parser = pages.arguments(__doc__, "failures")
    parser.add_argument("--with", dest="names", metavar="A,B", help="these libraries only")
    args = parser.parse_args()
    names = args.names.split(",") if args.names else list(NAMES)
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(NAMES)}")
    failed = launch.set_up(names)
    results, cases = {}, (*DIFFER, *GONE)
    names = [name for name in names if name not in failed]
    for i, name in enumerate(names):
        results[name] = {}
        for k, case in enumerate(cases):
            part = f"{i * len(cases) + k + 1}/{len(names) * len(cases)}"
            print(f"\r  {part}  {name}: {case:<30}", end="", flush=True)
            results[name][case] = play(name, case)
    print(f"\r{'':70}")
    versions = launch.versions(names)
    facts = {"versions": versions, "skipped": failed, "time_limit_s": WAIT_S}
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    about = (
        f"{known}. Three ranks; the odd one is rank {ODD}. The time limit of a call is {WAIT_S:g} "
        f"s where the library has one; who waits after {PATIENCE_S:g} s hangs. Ranks that were to "
        "go do not count. An MPI's launcher ends all processes when one is killed."
    )
    title = "What ranks get when one of them differs, or is gone"
    pages.write(args.name, title, about, table(results), **facts, results=results)


if __name__ == "__main__":
    main()
