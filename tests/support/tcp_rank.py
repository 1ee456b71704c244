"""A rank that reaches the others over TCP: ``tcp_rank.py RANK WORLD_SIZE FOLDER TEXT``.

The ranks meet by files in the folder; then each runs the text, which has `comm`, `rank`, `np`.
"""

import json
import os
import secrets
import sys
import time
from pathlib import Path

import numpy as np

from pycoll.comm import Communicator
from pycoll.config import Config
from pycoll.runtime.sessions.message_session import MpiJob, MpiSession
from pycoll.runtime.startup import tcp_connections
from pycoll.runtime.startup.hosts import Card


def main():
    rank, n, folder, text = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]

    def exchange(topic, value):
        (folder / f"{rank}.new").write_text(json.dumps(value))
        os.replace(folder / f"{rank}.new", folder / f"{topic}.{rank}")
        paths = [folder / f"{topic}.{r}" for r in range(n)]
        while not all(path.exists() for path in paths):
            time.sleep(0.005)
        return [json.loads(path.read_text()) for path in paths]

    word = exchange("word", secrets.token_hex(8))[0]
    pids = exchange("pid", os.getpid())
    cards = [Card(f"host{r}", f"host{r}", pid) for r, pid in enumerate(pids)]
    names = [f"rank {r}" for r in range(n)]
    ends = tcp_connections.connect(exchange, rank, names, "", 20)
    job = MpiJob(
        tcp_connections.open_api(ends, names), None, cards, tuple(range(n)), "TCP", word=word
    )
    config = Config.from_env()
    comm = Communicator(MpiSession(job, list(range(n)), rank, 0, config))
    exec(compile(text, "program.py", "exec"), {"comm": comm, "rank": rank, "np": np, "time": time})


if __name__ == "__main__":
    main()
