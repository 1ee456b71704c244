"""Run the tests of trainers on gloo and on pycoll, side by side.

``python benchmarks/torch_trainers.py FOLDER [NAME ...]`` makes an environment for each trainer in
FOLDER, runs a stated part of its own tests on gloo, then the same with groups of pycoll under the
name of gloo, and prints a table. The tests are those of the release on PyPI. Where that has none,
``--sources`` names a folder with checkouts of releases, such as ``DeepSpeed-0.19.5``.
"""

import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from harness import pages
from trainers.environments import python_of, sources_of, variables
from trainers.suites import TRAINERS

WORDS = {"failure": "fails", "error": "fails", "skipped": "skipped"}
WORST = ("fails", "skipped", "passes")


def obey(command, where, env, log, limit_s):
    """Run a command to its end or its limit, with all that it has started; return its status."""
    with log.open("w") as file:
        child = subprocess.Popen(
            list(map(str, command)),
            cwd=where,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return "limit"
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # what a test has left behind
            except ProcessLookupError:
                pass
            child.wait()


def read(report):
    """Return how each test of a JUnit file has ended: the worst of its ranks."""
    ends = {}
    if report.exists():
        for case in ET.parse(report).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            how = [WORDS[part.tag] for part in case if part.tag in WORDS] or ["passes"]
            ends[name] = min([*how, ends.get(name, "passes")], key=WORST.index)
    return ends


def stem_of(folder, trainer, part):
    """Return what the names of a part's files begin with."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs / re.sub(r"\W+", "-", f"{trainer.name} {part.label}")


def run(trainer, part, backend, folder, sources):
    """Run a part of a trainer's tests; return how each ended, and how many groups there were."""
    stem = stem_of(folder, trainer, part)
    log, report, made = (Path(f"{stem}-{backend}.{end}") for end in ("log", "xml", "groups"))
    for old in (report, made):
        old.unlink(missing_ok=True)
    python = python_of(folder, trainer)
    where = sources_of(folder, sources, trainer) / part.folder
    env = {**os.environ, **variables(folder, backend, made), **part.env}
    env["PATH"] = f"{python.parent}:{env['PATH']}"
    words = part.words if part.program else [*part.words, f"--junitxml={report}"]
    status = obey([python, *words], where, env, log, part.limit_s)
    ends = {part.label: "passes" if status == 0 else "fails"} if part.program else read(report)
    groups = Counter(made.read_text().split() if made.exists() else ())
    return {"status": status, "ends": ends, "groups": groups}


def summary(found):
    """Say in words how many tests passed and did not."""
    counts = Counter(found["ends"].values())
    kinds = ("passes", "pass"), ("fails", "fail"), ("skipped", "skipped")
    words = [f"{counts[how]} {word}" for how, word in kinds if counts[how]]
    return ", ".join([*words, *["stopped at its limit"] * (found["status"] == "limit")])


def lines(trainer, part, found):
    """Return the row of a part, and print where the two differ."""
    theirs, ours = found["gloo"]["ends"], found["pycoll"]["ends"]
    other = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    for name in other:
        print(f"  {name}: gloo {theirs.get(name)}, pycoll {ours.get(name)}")
    kinds = "; ".join(f"{n} {kind}" for kind, n in found["pycoll"]["groups"].items())
    return [
        trainer.name,
        part.label,
        summary(found["gloo"]),
        summary(found["pycoll"]),
        str(len(other)),
        kinds,
    ]


def main():
    parser = pages.arguments(__doc__)
    parser.add_argument("folder", type=Path, help="for environments, sources and logs")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(TRAINERS)}")
    parser.add_argument("--sources", type=Path, help="folder of checkouts")
    parser.add_argument("--part", default="", help="only parts with this in their label")
    chosen = parser.parse_intermixed_args()
    folder, rows = chosen.folder.resolve(), []
    for trainer in (TRAINERS[name] for name in chosen.names or TRAINERS):
        for part in (p for p in trainer.runs if chosen.part in p.label):
            found = {
                backend: run(trainer, part, backend, folder, chosen.sources)
                for backend in ("gloo", "pycoll")
            }
            rows.append(lines(trainer, part, found))
            print(" | ".join(rows[-1]), flush=True)
            Path(f"{stem_of(folder, trainer, part)}.json").write_text(json.dumps(found, indent=1))
    head = ["trainer", "tests", "gloo", "pycoll", "differ", "groups with pycoll"]
    print("\n".join(pages.table(head, rows)))


if __name__ == "__main__":
    sys.exit(main())
