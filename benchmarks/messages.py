"""Time messages between two ranks: by mailbox, copied once by the receiver, and as pycoll chooses.

``python benchmarks/messages.py`` takes ten seconds. The ways take turns of a few milliseconds,
and each ratio is of two neighbouring turns; the median counts. A round trip is a message there and
one back, into the array that was sent or into another one. It prints a table and writes
benchmarks/results/messages.md and .json.
"""

import argparse
import contextlib
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
from pycoll.cli.common.machine import describe
from pycoll.runtime.startup.bootstrap import launched_by_us

HERE = Path(__file__).resolve().parent
SIZES = [300 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20]
WAYS = {
    "mailbox": _C.Offers.NEVER,
    "once": _C.Offers.ALWAYS,
    "chosen": _C.Offers.WANTED,
}
TURN_BYTES = 8 << 20  # that a turn sends each way, at least


def there_and_back(comm, x, y):
    """Send x to the other rank, which sends its own back, into y."""
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(y, 1)
    else:
        comm.recv(y, 0)
        comm.send(x, 0)


def round_trip(comm, x, y, count):
    """Return the seconds of a round trip, of several in a row."""
    comm.barrier()
    start = time.perf_counter()
    for _ in range(count):
        there_and_back(comm, x, y)
    return (time.perf_counter() - start) / count


def measure(comms, nbytes, same, rounds):
    """Return the times of all ways, by turns."""
    x = np.full(nbytes, 7, np.uint8)
    y = x if same else np.full(nbytes, 1, np.uint8)
    count = max(2, TURN_BYTES // nbytes)
    turns = [[round_trip(comms[way], x, y, count) for way in WAYS] for _ in range(rounds + 1)]
    assert (y == 7).all()
    return turns[1:]


def rank(rounds):
    """Measure; rank 0 prints a line of JSON for each size and kind."""
    with pycoll.init() as comm, contextlib.ExitStack() as stack:
        comms = {way: stack.enter_context(comm.dup()) for way in WAYS}
        for way, offers in WAYS.items():
            session = comms[way]._session
            session._mailboxes = _C.Mailboxes(session.engine, offers=offers)
        for nbytes in SIZES:
            for same in (False, True):
                turns = measure(comms, nbytes, same, rounds)
                if comm.rank == 0:
                    print(json.dumps({"nbytes": nbytes, "same": same, "turns": turns}), flush=True)


def row(found):
    """Return one line of the table."""
    times = zip(*found["turns"], strict=True)
    mailbox, once, chosen = (f"{1e6 * statistics.median(way):.0f} us" for way in times)
    where = "the array that was sent" if found["same"] else "another array"
    ratios = [ratio_of(found["turns"], way) for way in (1, 2)]
    cells = [f"{found['nbytes'] >> 10} KiB", where, mailbox, once, ratios[0], chosen, ratios[1]]
    return f"| {' | '.join(cells)} |"


def ratio_of(turns, way):
    """Return how many times as fast as the mailbox a way is, and the middle half of the turns."""
    ratios = sorted(times[0] / times[way] for times in turns)
    quarter = len(ratios) // 4
    return f"{statistics.median(ratios):.2f} ({ratios[quarter]:.2f}-{ratios[-1 - quarter]:.2f})"


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
        "| message | into | mailbox | once | x | chosen | x |",
        "|---|---|---|---|---|---|---|",
        *map(row, rows),
    ]
    print("\n".join(table))
    machine, out = describe(), HERE / "results"
    about = (
        f"`python benchmarks/messages.py --rounds {args.rounds}`, {time.strftime('%Y-%m-%d')}, "
        f"{machine['cores']} cores of {machine['cpu']}{' (virtual)' * machine['virtual']}, "
        f"{platform.system()} {machine['kernel']}, pycoll {machine['pycoll']} at "
        f"{machine['commit'] or 'no commit'}, NumPy {machine['numpy']}. Round trips between two "
        "ranks: medians; x: how many times as fast as the mailbox, the median of the ratios of "
        "neighbouring turns, and their middle half. Arrays of 4 MiB and more lie on huge "
        "pages where NumPy gets them."
    )
    (out / f"{args.name}.md").write_text("\n".join([about, "", *table, ""]), encoding="utf-8")
    document = {"machine": machine, "rows": rows}
    (out / f"{args.name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
