"""Time messages between two ranks: by mailbox, copied once by the receiver, and as pycoll chooses.

``python benchmarks/messages.py`` takes ten seconds. The ways take turns of a few milliseconds,
and each ratio is of two turns of one round; the median counts. A round trip is a message there and
one back, into the array that was sent or into another one. It prints a table and writes
benchmarks/results/messages.md and .json.
"""

import contextlib
import functools
import statistics

import numpy as np
from harness import pages, start
from harness.ranks import contest, there_and_back

from pycoll import _C

SIZES = [300 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20]
WAYS = {"mailbox": _C.Offers.NEVER, "once": _C.Offers.ALWAYS, "chosen": _C.Offers.WANTED}
TURN_BYTES = 8 << 20  # that a turn sends each way, at least


def rank(comm, rounds):
    """Return the times of all ways for each size and kind."""
    rows = []
    with contextlib.ExitStack() as stack:
        comms = {way: stack.enter_context(comm.dup()) for way in WAYS}
        for way, offers in WAYS.items():
            session = comms[way]._session
            session._mailboxes = _C.Mailboxes(session.engine, offers=offers)
        for nbytes in SIZES:
            for same in (False, True):
                x = np.full(nbytes, 7, np.uint8)
                y = x if same else np.full(nbytes, 1, np.uint8)
                calls = {way: functools.partial(there_and_back, comms[way], x, y) for way in WAYS}
                count = max(2, TURN_BYTES // nbytes)
                found = contest(comm, {way: (calls[way], count) for way in WAYS}, int(rounds))
                assert (y == 7).all()
                times = {way: found[way]["seconds"] for way in WAYS}
                rows.append({"nbytes": nbytes, "same": same, "rounds": times})
    return rows


def line_of(row):
    times = row["rounds"]
    us = {way: f"{1e6 * statistics.median(times[way]):.0f} us" for way in WAYS}
    x = {}
    for way in WAYS:
        ratios = [a / b for a, b in zip(times["mailbox"], times[way], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        x[way] = f"{middle:.2f} ({low:.2f}-{high:.2f})"
    where = "the array that was sent" if row["same"] else "another array"
    cells = [f"{row['nbytes'] >> 10} KiB", where, us["mailbox"]]
    return [*cells, us["once"], x["once"], us["chosen"], x["chosen"]]


def main():
    parser = pages.arguments(__doc__, "messages")
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    rows = start.measure(__file__, 2, args.rounds)
    about = (
        "Round trips between two ranks: medians; x: how many times as fast as the mailbox, the "
        "median of the ratios of the rounds, and their middle half. Arrays of 4 MiB and more lie "
        "on huge pages where NumPy gets them."
    )
    lines = pages.table(["message", "into", *"mailbox once x chosen x".split()], map(line_of, rows))
    pages.write(args.name, "Messages between two ranks", about, lines, rows=rows)


if __name__ == "__main__":
    start.main(main, rank)
