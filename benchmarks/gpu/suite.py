"""Run the stages one after the other, each in a process of its own with a time limit; then report.

Nothing of one stage is lost when another one hangs or fails.
"""

import argparse
import contextlib
import datetime
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import report
from rows import Writer

import build_cuda

LIMIT_S = 525.0
KILL_S = 5.0
SKIPPED = 77  # exit status of a stage that cannot run here
SANITIZERS = ("memcheck", "synccheck", "racecheck")
# What runs of a part do, and the seconds that they may take.
_FIRST = "tools build facts float8 packets messages2 offload2 traced2"  # whatever is newest
_RIGHT = "correct faults vmm2 ipc2 nccl2 graphs assumptions"
PARTS = {"smoke": ([*_FIRST.split(), *_RIGHT.split(), *SANITIZERS], 240.0)}
PARTS["measure"] = "facts speed moves steps norm train2 torch2 nccl4".split(), 300.0


def sanitizer():
    """Return the path of compute-sanitizer, which comes with nvcc, or its name."""
    beside = os.path.join(os.path.dirname(build_cuda.find_nvcc() or ""), "compute-sanitizer")
    return shutil.which("compute-sanitizer") or shutil.which(beside) or "compute-sanitizer"


def stages(python):
    """Return name, command and time limit of every stage."""
    jobs = str(os.cpu_count() or 1)
    build = [python, "setup.py", "-q", "build_ext", "--inplace"]
    ranks = [python, "-m", "pycoll", "run", "-n"]
    check = [sanitizer(), "--error-exitcode", "1", "--report-api-errors", "no"]
    few = [python, HERE / "correct.py", "--few"]
    return [  # what proves most in the least time comes first: the time for all may be over early
        ("tools", [python, HERE / "tools.py"], 20.0),
        ("build", ["env", f"PYCOLL_BUILD_JOBS={jobs}", "PYCOLL_CUDA=1", *build], 170.0),
        ("facts", [python, HERE / "facts.py"], 60.0),  # loads CUDA and CuPy for the first time
        ("float8", [python, HERE / "correct.py", "--float8"], 40.0),
        ("packets", [python, HERE / "correct.py", "--packets"], 40.0),
        ("messages2", [*ranks, "2", HERE / "ranks.py", "cuda", "--messages"], 40.0),
        ("offload2", [*ranks, "2", HERE / "training.py", "--offload"], 40.0),
        ("traced2", ["env", "PYCOLL_NVTX=1", *ranks, "2", HERE / "traced.py"], 40.0),
        ("correct", [python, HERE / "correct.py"], 90.0),
        ("faults", [python, HERE / "faults.py"], 45.0),
        ("vmm2", [*ranks, "2", HERE / "ranks.py", "cuda"], 45.0),
        ("ipc2", ["env", "PYCOLL_DEVICE_MEMORY=ipc", *ranks, "2", HERE / "ranks.py", "cuda"], 45.0),
        ("nccl2", [*ranks, "2", HERE / "ranks.py", "nccl"], 45.0),
        ("graphs", [python, HERE / "graphs.py"], 30.0),
        *((tool, [*check, "--tool", tool, *few], 60.0) for tool in SANITIZERS),
        ("assumptions", [python, HERE / "assumptions.py"], 60.0),
        ("train2", [*ranks, "2", HERE / "training.py"], 45.0),
        ("speed", [python, HERE / "speed.py"], 120.0),
        ("moves", [python, HERE / "moves.py"], 60.0),
        ("steps", [python, HERE / "steps.py"], 60.0),
        ("norm", [python, HERE / "norm.py"], 90.0),
        ("torch2", [*ranks, "2", HERE / "torch_group.py"], 90.0),
        ("nccl4", [*ranks, "4", HERE / "ranks.py", "nccl"], 45.0),
    ]


def run_stage(command, limit, log):
    """Run a command; return its exit status, or None if it had to be killed.

    What it says is appended to a file, so that few files have to be taken along.
    """
    with open(log, "ab") as out:
        out.write(f"\n== {' '.join(map(str, command))}\n".encode())
        out.flush()
        try:
            child = subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            out.write(f"{error}\n".encode())
            return 127
        try:
            return child.wait(limit)
        except subprocess.TimeoutExpired:
            for what in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, what)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(KILL_S)
            return None


def attempt(name, command, limit, log, writer):
    """Run a stage and tell how it ended; return its exit status, or None if it had to be killed."""
    os.environ["PYCOLL_GPU_STAGE"] = name
    start = time.monotonic()
    status = run_stage(command, limit, log)
    spent = round(time.monotonic() - start, 1)
    known = {0: "done", SKIPPED: "skipped", None: "killed: too slow"}
    words = known.get(status, f"exit status {status}")
    writer.row(name, None if status == SKIPPED else status == 0, status=words, seconds=spent)
    print(f"{name:12}{words}, {spent} s", flush=True)
    said = log.read_text(errors="replace").rpartition("\n== ")[2]
    if status == SKIPPED:
        print(f"{'':12}{said.rpartition('skipped: ')[2].strip()}", flush=True)
    elif status != 0:
        print(said[-1500:], flush=True)
    return status


def usable():
    """Whether there are an extension and a device library that can be loaded, built by whomever."""
    text = "import pycoll._C; from pycoll.cuda.device.library import library; library()"
    try:
        command = [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def run(folder, wanted, limit, without=()):
    """Run the wanted stages; return the names of those that did not succeed.

    A choice of stages adds to what earlier runs have left in that folder; a whole run begins anew.
    Where no device is found nothing else is tried.
    """
    begin, failed, problems = time.monotonic(), [], []
    results, log = folder / "rows.jsonl", folder / "stages.log"
    if not wanted and not without:
        for file in (results, log):
            file.unlink(missing_ok=True)
    os.environ["PYCOLL_GPU_ROWS"] = str(results.resolve())
    writer = Writer(results, "suite")
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    writer.row("begin", date=when)
    for name, command, seconds in stages(sys.executable):
        if (wanted and name not in wanted) or name in without:
            continue
        left, over = limit - (time.monotonic() - begin), False
        if left < 5:
            writer.row(name, False, status="not run", reason="no time was left")
            failed.append(name)
        else:
            status = attempt(name, command, min(seconds, left), log, writer)
            bare = name == "facts" and status == SKIPPED  # there is no device
            good = not bare and status in (0, SKIPPED)
            failed += [] if good else [name]
            over = bare or (name == "build" and not good and not usable())
            if name == "build" and not good and not over:
                writer.row(name, None, status="libraries built before are used instead")
        problems = report.write(folder)  # now, as the next stage may take the machine with it
        if over:
            break
    for why in problems:
        print(f"report: {why}", flush=True)
    return failed + ["report"] * bool(problems)


def main(argv=None):
    """Run the suite; return 1 if a stage failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "benchmarks/results/gpu")
    parser.add_argument("--stage", action="append", help="run this one only; may be repeated")
    parser.add_argument("--skip", action="append", help="leave this one out; may be repeated")
    parser.add_argument("--part", choices=PARTS, help="see README.md")
    parser.add_argument("--limit", type=float, help="seconds for everything")
    args = parser.parse_args(argv)
    names = [name for name, _, _ in stages("python")]
    unknown = {*(args.stage or ()), *(args.skip or ())} - set(names)
    if unknown:
        parser.error(f"unknown stage {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    wanted, without = args.stage, args.skip or []
    in_part, seconds = PARTS.get(args.part, (None, LIMIT_S))
    if in_part is not None:
        wanted = [*in_part, *(wanted or ())]
        built = usable()
        without += ["build"] if built else []
        if not built and "build" in wanted:
            print("no libraries can be loaded here: they are built first", flush=True)
    failed = run(args.folder, wanted, args.limit or seconds, without)
    print("\n" + report.head(args.folder))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
