"""The store of a job: what a rank does where rank 0 gives up on it."""

import socket
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
