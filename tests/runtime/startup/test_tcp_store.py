"""The store of a job: what a rank does where rank 0 gives up on it."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from pycoll.errors import PeerLost
from pycoll.runtime.startup import tcp_store
from pycoll.runtime.startup.tcp_store import StoreClient, StoreServer

SECRET = "what only the tests know"


def gives_up(server, unread):
    """Greet one client as a store does, and hang up without an answer to its proof."""
    with server:
        line, _ = server.accept()
        with line:
            line.sendall(b"c" * 32)
            line.recv(64 - unread, socket.MSG_WAITALL)  # the system resets it if some is unread


@pytest.mark.parametrize("unread", [0, 1])
def test_a_store_that_gives_up_on_a_rank_is_asked_again(monkeypatch, unread):
    """It does where the network stalls: that says nothing of its secret, nor that it is gone."""
    first = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(0, SECRET, 1)
    ports = iter([first.getsockname()[1], server._socket.getsockname()[1]])
    connect = socket.create_connection
    monkeypatch.setattr(
        tcp_store.socket,
        "create_connection",
        lambda at, limit: connect((at[0], next(ports)), limit),
    )
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gives_up, first, unread)
        client = StoreClient("127.0.0.1", 1, SECRET, 20)
    assert not client.check(["a"])
    client.close()
    server.close()


def test_a_store_that_gives_up_and_ends():
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gives_up, server, 1)
        with pytest.raises(PeerLost, match="has left while ranks were joining"):
            StoreClient("127.0.0.1", port, SECRET, 60)


NO_DESCRIPTOR_LEFT = """
import os, resource, socket, time
from pycoll.errors import TransportError
from pycoll.runtime.startup.tcp_store import StoreClient, StoreServer

server = StoreServer(0, "what only this knows", 1)
port = server._socket.getsockname()[1]
time.sleep(0.2)
free = os.dup(0)
os.close(free)
client = socket.socket()
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))
client.connect(("127.0.0.1", port))
time.sleep(0.5)
began = time.monotonic()
try:
    StoreClient("127.0.0.1", port, "what only this knows", 20)
except TransportError as error:
    assert "Too many open files; raise the limit" in str(error), error
    assert time.monotonic() - began < 10
    print("told", flush=True)
os._exit(0)
"""


def test_without_a_descriptor_left_a_rank_says_so_at_once_and_once():
    words = [sys.executable, "-c", NO_DESCRIPTOR_LEFT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("told\n", "")
