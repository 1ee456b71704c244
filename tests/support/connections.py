"""Ranks as threads that are connected over TCP."""

import threading

from pycoll.runtime.startup import tcp_connections
from pycoll.runtime.startup.tcp_proofs import Endpoint, Proofs, new_word


def meet(n, fn):
    """Run ``fn(rank, exchange)`` on n threads; return the results, or raise what one raised."""
    rows, barrier, results = [None] * n, threading.Barrier(n), [None] * n

    def run(rank):
        def exchange(topic, value):
            rows[rank] = value
            barrier.wait(30)
            found = list(rows)
            barrier.wait(30)
            return found

        try:
            results[rank] = fn(rank, exchange)
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def names(n):
    return [f"rank {r}" for r in range(n)]


def connect(exchange, rank, n):
    return tcp_connections.open_api(
        tcp_connections.connect(exchange, rank, names(n), "", 10), names(n)
    )


def signed(place, rank, secret=""):
    """Return what a rank says of how it can be reached, after it has been changed."""
    return Proofs(secret, rank, names(rank + 1)).sign(place)


def somewhere(port, rank):
    """Return a place of a rank on this host."""
    return signed(Endpoint(port, ["127.0.0.1"], new_word()), rank)
