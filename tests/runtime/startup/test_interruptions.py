"""Hosts between which all packets are lost for a while, shorter than it takes to be lost."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from namespaces import CABLE, addresses, ip, two_hosts

ROOT = Path(__file__).resolve().parents[3]
TCP_RTO_MAX_MS = 44
NOBODY = "lladdr 02:00:00:00:00:ff nud permanent"
TEXT = """
import time, pycoll
with pycoll.init() as comm:
    comm.barrier()
    print("joined", flush=True)
    until = time.monotonic() + 8
    while comm.all_reduce(int(time.monotonic() < until), "min"):
        pass
print("all", flush=True)
"""


def needs_short_pauses():
    """Skip the test where TCP cannot be told how long its pauses may be."""
    with socket.socket() as line:
        try:
            line.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000)
        except OSError as error:
            pytest.skip(f"Linux before 6.15: {error}")


def lose(hosts, verb, more=()):
    """Lose all packets between two hosts, or end that."""
    for here, there in zip(hosts, reversed(addresses(hosts)), strict=True):
        done = ip("-n", here, "neigh", verb, there, "dev", CABLE, *more)
        assert done.returncode == 0, done.stderr


def start(rank, host, master):
    """Start a rank on a host of two."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": "29500"}
    place |= {"PYCOLL_SECRET": "what only the tests know", "PYCOLL_TIMEOUT": "10"}
    return subprocess.Popen(
        ["ip", "netns", "exec", host, "unshare", "--ipc", sys.executable, "-c", TEXT],
        env={**os.environ, "PYTHONPATH": str(ROOT), **place},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_interruption_that_is_over_in_time_is_no_failure():
    """Hosts are lost after 5 s here. TCP would ask after 3 s, and then only after 6.2 s."""
    needs_short_pauses()
    with two_hosts() as hosts:
        ranks = [start(r, host, addresses(hosts)[0]) for r, host in enumerate(hosts)]
        try:
            joined = [rank.stdout.readline() for rank in ranks]
            lose(hosts, "replace", NOBODY.split())
            time.sleep(3.5)
            lose(hosts, "del")
            ends = [rank.communicate(timeout=40) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert joined == ["joined\n"] * 2
    assert ends == [("all\n", "")] * 2
