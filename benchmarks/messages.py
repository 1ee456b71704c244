"""Time messages between two ranks: through the mailbox, and copied once by the receiver.

``python benchmarks/messages.py`` takes half a minute. Both ways take turns of a few milliseconds,
and each ratio is of two neighbouring turns; the median counts. A round trip is a message there and
one back, into the array that was sent or into another one. It prints a table and writes
benchmarks/results/messages.md and .json.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import pycoll
from pycoll import _C
from pycoll.cli.machine import describe
from pycoll.runtime.bootstrap import launched_by_us

HERE = Path(__file__).resolve().parent
SIZES = [300 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20]
WAYS = ("mailbox", "once")
TURN_BYTES = 8 << 20  # that a turn sends each way, at least


def round_trip(comm, x, y, count):
    """Return the seconds of a round trip, of several in a row."""
    comm.barrier()
    start = time.perf_counter()
    for _ in range(count):
        if comm.rank == 0:
            comm.send(x, 1)
            comm.recv(y, 1)
        else:
            comm.recv(y, 0)
            comm.send(x, 0)
    return (time.perf_counter() - start) / count


def measure(comms, nbytes, same, rounds):
    """Return the times of both ways, by turns."""
    x = np.full(nbytes, 7, np.uint8)
    y = x if same else np.full(nbytes, 1, np.uint8)
    count = max(2, TURN_BYTES // nbytes)
    turns = [[round_trip(comms[way], x, y, count) for way in WAYS] for _ in range(rounds + 1)]
    assert (y == 7).all()
    return turns[1:]


def rank(rounds):
    """Measure; rank 0 prints a line of JSON for each size and kind."""
    with pycoll.init(single_copy="auto") as once, once.dup() as mailbox:
        mailbox._session._mailboxes = _C.Mailboxes(mailbox._session.engine, offers=False)
        comms = {"mailbox": mailbox, "once": once}
        for nbytes in SIZES:
            for same in (False, True):
                turns = measure(comms, nbytes, same, rounds)
                if once.rank == 0:
                    print(json.dumps({"nbytes": nbytes, "same": same, "turns": turns}), flush=True)


def row(found):
    """Return one line of the table."""
    mailbox, once = (statistics.median(times) for times in zip(*found["turns"], strict=True))
    ratios = sorted(a / b for a, b in found["turns"])
    quarter = len(ratios) // 4
    where = "the array that was sent" if found["same"] else "another array"
    return (
        f"| {found['nbytes'] >> 10} KiB | {where} | {1e6 * mailbox:.0f} us | {1e6 * once:.0f} us "
        f"| {statistics.median(ratios):.2f} | {ratios[quarter]:.2f}-{ratios[-1 - quarter]:.2f} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--name", default="messages", help="of the files of results (messages)")
    args = parser.parse_args()
    if launched_by_us():
        rank(args.rounds)
        return
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", __file__]
    done = subprocess.run(
        [*command, "--rounds", str(args.rounds)], stdout=subprocess.PIPE, text=True, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    table = [
        "| message | into | mailbox | once | times faster | middle half |",
        "|---|---|---|---|---|---|",
        *map(row, rows),
    ]
    print("\n".join(table))
    machine, out = describe(), HERE / "results"
    about = (
        f"`python benchmarks/messages.py --rounds {args.rounds}`, {time.strftime('%Y-%m-%d')}, "
        f"{machine['cores']} cores of {machine['cpu']}{' (virtual)' * machine['virtual']}, "
        f"{platform.system()} {machine['kernel']}, pycoll {machine['pycoll']} at "
        f"{machine['commit'] or 'no commit'}, NumPy {machine['numpy']}. Round trips between two "
        "ranks: medians, and the ratio of neighbouring turns. Arrays of 4 MiB and more lie on huge "
        "pages where NumPy gets them."
    )
    (out / f"{args.name}.md").write_text("\n".join([about, "", *table, ""]), encoding="utf-8")
    document = {"machine": machine, "rows": rows}
    (out / f"{args.name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
