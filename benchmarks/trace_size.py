"""A trace of many ranks: bytes of a call, and how long it takes to read, count and convert.

    python benchmarks/trace_size.py --ranks 64 --calls 10000

The ranks are threads of one process. Threads that outnumber the cores take long to meet, so the
calls themselves are slow here.
"""

import argparse
import tempfile
import time
from pathlib import Path

from pycoll.config import Config
from pycoll.observe.report import page
from pycoll.observe.report.analysis import analyse
from pycoll.observe.trace import chrome
from pycoll.observe.trace.merged import merge
from pycoll.testing import run_threads


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--calls", type=int, default=10_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:

        def rank(comm):
            x = comm.zeros(1)
            with comm.trace(folder):
                for _ in range(args.calls):
                    comm.all_reduce(x, out=x)

        start = time.perf_counter()
        run_threads(args.ranks, rank, config=Config(timeout_s=600, heap_bytes=1 << 20), timeout=900)
        print(f"{args.ranks} ranks x {args.calls:,} calls: {time.perf_counter() - start:.1f} s")
        calls = args.ranks * args.calls
        records = sum(p.stat().st_size for p in Path(folder).glob("*.calls"))
        notes = sum(p.stat().st_size for p in Path(folder).glob("*.jsonl"))
        print(
            f"{(records + notes) / calls:.2f} bytes a call, {notes / calls:.2f} of them for sites, "
            "memory and heads"
        )
        start = time.perf_counter()
        seen = analyse(merge(folder))
        assert sum(row.calls for row in seen.ranks) + seen.lost == calls
        print(f"read and counted in {time.perf_counter() - start:.1f} s; {seen.lost:,} calls lost")
        start = time.perf_counter()
        nbytes = chrome.write(seen.trace, Path(folder) / chrome.FILE)
        html = len(page.render(seen))
        took = time.perf_counter() - start
        print(f"for Perfetto ({nbytes / 1e6:.1f} MB) and as a page ({html:,} bytes): {took:.1f} s")


if __name__ == "__main__":
    main()
