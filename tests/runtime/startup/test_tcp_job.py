"""Ranks whom the environment tells where they meet: over TCP, without MPI or PyTorch."""

import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from namespaces import CABLE, addresses, ip, two_hosts
from pycoll.errors import CollTimeout, TransportError
from pycoll.runtime.startup import tcp_job, tcp_store
from pycoll.runtime.startup.store_meeting import StoreMeeting
from pycoll.runtime.startup.tcp_store import StoreClient, StoreServer

ROOT = Path(__file__).resolve().parents[3]
SECRET = "what only the tests know"
PROGRAM = """
import json, sys, warnings
import numpy as np, pycoll
warnings.simplefilter("error")
with pycoll.init(timeout=20) as comm:
    x = np.arange(3000.0) * (comm.rank + 1)
    total = comm.all_reduce(x)
    part = comm.split(comm.rank % 2)
    row = [comm.transport, float(total.sum()), int(part.all_reduce(1)), pycoll.init().rank]
    if comm.world_size > 1:
        comm.sendrecv(x, (comm.rank + 1) % comm.world_size, x, (comm.rank - 1) % comm.world_size)
    row.append(float(x[1]))
    comm.close()
    row.append(int(part.all_reduce(1)))  # connections stay for it
    part.close()
print(json.dumps(row), flush=True)
"""


def free_port():
    """Return a port that is free, and so is the next one, most likely."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(rank, n, port, *, text=PROGRAM, apart=False, inside=(), **more):
    """Start a rank, on a host of its own as far as pycoll can see if it is to be apart.

    `inside` has words before its command.
    """
    place = {"RANK": str(rank), "WORLD_SIZE": str(n)}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "PYCOLL_SECRET": SECRET}
    return subprocess.Popen(
        [*inside, *["unshare", "--ipc"] * apart, sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": str(ROOT), **place, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(ranks):
    """Return exit status, stdout and stderr of each."""
    try:
        ends = [rank.communicate(timeout=40) for rank in ranks]
        return [(rank.returncode, *end) for rank, end in zip(ranks, ends, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="another namespace is for root")


@pytest.mark.parametrize(
    ("n", "apart"),
    [
        (3, ()),
        pytest.param(3, (1, 2), marks=AS_ROOT),
        pytest.param(2, (1,), marks=AS_ROOT),
    ],
)
def test_ranks_meet(n, apart):
    port = free_port()
    ends = finish([start(r, n, port, apart=r in apart) for r in range(n)])
    for rank, (status, out, err) in enumerate(ends):
        assert (status, err) == (0, "")
        transport, total, size, again, first, later = json.loads(out)
        assert ("TCP" in transport) == bool(apart)
        assert total == 3000 * 2999 / 2 * n * (n + 1) / 2
        assert size == later == len(range(rank % 2, n, 2))
        assert (again, first) == (rank, 1.0 + (rank - 1) % n)


def test_a_rank_that_does_not_come():
    text = "import pycoll\npycoll.init(timeout=1.5)"
    ends = finish([start(r, 3, port, text=text) for port in [free_port()] for r in (0, 1)])
    for status, _, err in ends:
        assert status == 1
        assert "CollTimeout" in err or "PeerLost" in err
    assert "for rank 2 of 3 to join the group" in ends[0][2]
    assert "pycoll.init" in ends[0][2]


def test_rank_0_does_not_come():
    text = "import pycoll\npycoll.init(timeout=0.5)"
    ((status, _, err),) = finish([start(1, 2, free_port(), text=text)])
    assert status == 1
    assert "rank 0 was not at localhost port" in err


def test_another_secret():
    text = "import pycoll\npycoll.init(timeout=2)"
    port = free_port()
    ranks = [start(0, 2, port, text=text), start(1, 2, port, text=text, PYCOLL_SECRET="x" * 20)]
    ends = finish(ranks)
    assert [status for status, _, _ in ends] == [1, 1]
    assert "secret" in ends[1][2].lower() or "has left" in ends[1][2]


@AS_ROOT
@pytest.mark.parametrize("apart", [True, False], ids=["hosts", "host"])
def test_hosts_without_a_secret(apart):
    """Rank 0 warns, and says where the program called; ranks that share memory need no secret."""
    text = "import pycoll\npycoll.init(timeout=20).close()"
    port = free_port()
    ends = finish(
        [start(r, 2, port, text=text, apart=apart and r == 1, PYCOLL_SECRET="") for r in (0, 1)]
    )
    assert [status for status, _, _ in ends] == [0, 0]
    assert ("<string>:2: RuntimeWarning: the ranks" in ends[0][2]) == apart
    assert ("PYCOLL_SECRET is not set" in ends[0][2]) == apart
    assert ends[1][2] == ""


TOOL = "import pycoll; print(pycoll.init(timeout=9).world_size)"
STARTS = f"""
import os, shlex, subprocess, sys, pycoll
comm = pycoll.init(timeout=20)
command = [sys.executable, "-c", {TOOL!r}]
def outcome(*before, shell=False):
    text = shlex.join(command) if shell else [*before, *command]
    done = subprocess.run(text, shell=shell, capture_output=True, text=True)
    return done.stdout or done.stderr.splitlines()[-1] + "\\n"
print(outcome(), outcome(shell=True), outcome("env", "-u", "RANK"), sep="", end="", flush=True)
comm.barrier()
comm.close()
"""


def test_what_a_rank_starts_is_no_rank():
    port = free_port()
    for rank, (status, out, err) in enumerate(
        finish([start(r, 2, port, text=STARTS) for r in (0, 1)])
    ):
        assert (status, err) == (0, "")
        *refused, alone = out.splitlines()
        assert alone == "1"
        assert len(refused) == 2
        for line in refused:
            assert line.startswith("pycoll.errors.TransportError: process ")
            assert f"has joined its job as rank {rank} of 2 and has started this process" in line


def test_a_program_behind_wrappers():
    """A process that has not joined may start one that does: a shell, another Python."""
    inner = "import pycoll\npycoll.init(timeout=20).close()"
    text = f"""
import shlex, subprocess, sys
command = shlex.join([sys.executable, "-c", {inner!r}])
done = subprocess.run(["bash", "-c", f"time {{command}} && true"], stderr=subprocess.DEVNULL)
sys.exit(done.returncode)
"""
    port = free_port()
    for status, _, err in finish([start(r, 2, port, text=text) for r in (0, 1)]):
        assert (status, err) == (0, "")


class Board(dict):
    """A store for the threads of one process."""

    set, get = dict.__setitem__, dict.__getitem__

    def check(self, keys):
        return all(key in self for key in keys)


class BytesBoard(Board):
    """Like stores of PyTorch, which return bytes."""

    def get(self, key):
        return self[key].encode()


def test_two_processes_come_as_one_rank():
    board = Board()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(StoreMeeting(board, 1, 3, 20, "init").meet, "first")
        while not board:
            time.sleep(0.01)
        second = pool.submit(StoreMeeting(board, 1, 3, 1, "init").meet, "second")
        with pytest.raises(TransportError, match="another process has come as rank 1 of 3 to init"):
            first.result(timeout=10)
        with pytest.raises(CollTimeout, match="waited 1 s for ranks 0, 2"):
            second.result(timeout=10)


def test_settings_that_differ_are_an_error_on_all_ranks():
    text = "import os, pycoll\npycoll.init(timeout=5 + int(os.environ['RANK']))"
    port = free_port()
    for status, _, err in finish([start(r, 2, port, text=text) for r in range(2)]):
        assert status == 1
        assert "ranks have different settings" in err


def test_ranks_that_differ_are_named_with_all_their_hosts():
    rows = [("a", "1"), ("b", "1"), ("b", "1"), ("b", "2")]
    members = [{"name": name, "version": v, "settings": ""} for name, v in rows]
    with pytest.raises(TransportError, match=r"ranks 0, 1, 2 on a, b: 1; rank 3 on b: 2$"):
        tcp_job._compare(members)


def test_a_setting_that_is_wrong_on_one_rank():
    text = "import pycoll\npycoll.init(timeout=10)"
    port = free_port()
    ranks = [start(r, 2, port, text=text, PYCOLL_CELL_BYTES=("1M", "7")[r]) for r in range(2)]
    ends = finish(ranks)
    assert [status for status, _, _ in ends] == [1, 1]
    assert "PeerLeft: rank 1 cannot join" in ends[0][2]
    assert "cell_bytes is 7" in ends[1][2]


def test_a_false_store_is_turned_away():
    """Whoever has the port of rank 0 does not know the secret, whatever it answers."""
    challenge, answer = b"c" * 32, b"a" * 32

    def pose(server):
        line, _ = server.accept()
        with line:
            line.sendall(challenge)
            line.recv(64, socket.MSG_WAITALL)
            line.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        posing = pool.submit(pose, server)
        with pytest.raises(TransportError, match="does not know the secret of this job"):
            StoreClient("127.0.0.1", server.getsockname()[1], SECRET, 20)
        posing.result()


def test_the_store_turns_strangers_away():
    port = free_port()
    server = StoreServer(port, SECRET, 1)
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.recv(32)
        stranger.sendall(b"x" * 64)
        assert len(stranger.recv(64, socket.MSG_WAITALL)) == 32  # which proves nothing
        assert stranger.recv(1) == b""
    client = StoreClient("localhost", port, SECRET, 5)
    assert not client.check(["a"])
    client.set("a", "text\n")
    assert client.check(["a"])
    assert client.get("a") == b"text\n"
    client.close()
    server.close()


def test_another_secret_is_an_error_at_once():
    port = free_port()
    server = StoreServer(port, SECRET, 1)
    with pytest.raises(TransportError, match="does not know the secret of this job"):
        StoreClient("localhost", port, "another", 60)
    client = StoreClient("localhost", port, SECRET, 60)
    told = r"none of them has come to init; a process at \S+ called with another PYCOLL_SECRET$"
    with pytest.raises(CollTimeout, match=told):  # the others wait for it
        StoreMeeting(client, 0, 2, 0.2, "init").meet(None)
    client.close()
    server.close()


def test_strangers_that_say_nothing_do_not_use_up_descriptors(capfd):
    port = free_port()
    server, most = StoreServer(port, SECRET, 1), 1 + tcp_store._MOST_STRANGERS
    with contextlib.ExitStack() as stack:
        connect = functools.partial(socket.create_connection, ("localhost", port))
        strangers = [stack.enter_context(connect()) for _ in range(most + 20)]
        first = [stranger.recv(32) for stranger in strangers]
        assert sum(map(bool, first)) == most
        assert len(server._talks) == most
        client = StoreClient("localhost", port, SECRET, 20)  # it tries again until they are gone
        client.set("a", "text")
        server.close()
        until = time.monotonic() + 5
        while not server._loop.is_closed() and time.monotonic() < until:
            time.sleep(0.01)
        assert server._loop.is_closed()
        client.close()
    assert capfd.readouterr().err == ""  # of tasks that are pending


def test_an_address_that_does_not_answer_leaves_time_for_the_next(monkeypatch):
    port, limit_s = free_port(), 16.0
    server = StoreServer(port, SECRET, 1)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # the system drops who calls from now on
            line = stack.enter_context(socket.socket())
            line.setblocking(False)
            line.connect_ex(full.getsockname())
        places = [full.getsockname(), ("127.0.0.1", port)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: found)
        began = time.monotonic()
        client = StoreClient("two-addresses", port, SECRET, limit_s)
        assert time.monotonic() - began < limit_s
        client.close()
    server.close()


def test_a_rank_that_reaches_itself_goes_on_waiting(monkeypatch):
    """A system may give a connection the very port that nobody listens at."""
    port, real, tries = free_port(), socket.create_connection, []

    def connect(place, timeout_s):
        tries.append(place)
        if len(tries) > 1:
            return real(place, timeout_s)
        itself = socket.socket()
        itself.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        itself.bind(("127.0.0.1", port))
        itself.connect(("127.0.0.1", port))
        late.append(threading.Timer(0.3, lambda: servers.append(StoreServer(port, SECRET, 1))))
        late[0].start()
        return itself

    servers, late = [], []
    monkeypatch.setattr(tcp_store.socket, "create_connection", connect)
    client = StoreClient("localhost", port, SECRET, 20)
    assert not client.check(["a"])
    client.close()
    servers[0].close()
    assert len(tries) > 2


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((3, 2, 3), "waited 1 s for rank 1 of 3 to join the group; rank 1 has come as one of 2"),
        ((3, 3, 0), "for rank 2 of 3 to join the group; none of them has come to init"),
        ((4, 4, 0, 4), "for rank 2 of 4 to join the group; none of them has come to init"),
    ],
)
def test_what_ranks_are_waited_for_and_why(sizes, told):
    board = BytesBoard()
    with ThreadPoolExecutor(4) as pool:
        meetings = [
            pool.submit(StoreMeeting(board, rank, size, 1, "init").meet, rank)
            for rank, size in enumerate(sizes)
            if size
        ]
        with pytest.raises(CollTimeout, match=told):
            meetings[0].result()


def test_a_host_that_is_cut_off_is_lost_in_half_the_time_limit():
    text = """
import pycoll
comm = pycoll.init()
comm.barrier()
print("joined", flush=True)
try:
    while True:
        comm.barrier()
except pycoll.PeerLost as error:
    print(error, flush=True)
"""
    port = free_port()
    with two_hosts() as hosts:
        place = {"MASTER_ADDR": addresses(hosts)[0], "PYCOLL_TIMEOUT": "6"}
        inside = [["ip", "netns", "exec", host] for host in hosts]
        ranks = [
            start(r, 2, port, text=text, apart=True, inside=inside[r], **place) for r in (0, 1)
        ]
        joined = [rank.stdout.readline() for rank in ranks]
        ip("-n", hosts[0], "link", "set", CABLE, "down")
        ends = finish(ranks)
    assert joined == ["joined\n"] * 2
    for rank, (status, out, err) in enumerate(ends):
        assert (status, err) == (0, "")
        assert re.search(rf"its host has not answered rank {rank} .* for 3 s", out)
