"""Counters for Prometheus, read when it asks for them."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from typing import Any

from pycoll.errors import ArgumentError, CollError
from pycoll.observe.counters.stats import BUCKETS_S, Stats, read
from pycoll.runtime.sessions.shared_use import is_open


class Metrics:
    """Serves the counters of a job's communicator, and of those split from it, over HTTP.

    Args:
        session: The communicator of all ranks.
        port: The port of rank 0; rank r takes ``port + r``.
        address: Where it listens.

    Raises:
        ArgumentError: If prometheus-client is missing, or the port is taken.
    """

    def __init__(self, session: Any, port: int, address: str) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError:
            raise ArgumentError(
                "PYCOLL_METRICS_PORT needs prometheus-client: pip install prometheus-client"
            ) from None
        self._session = weakref.ref(session)
        self.port: int = port + session.rank
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        try:
            self._server, self._thread = start_http_server(self.port, address, registry)
        except OSError as error:
            raise ArgumentError(
                f"rank {session.rank} cannot serve metrics at {address}:{self.port}: {error}"
            ) from None
        atexit.register(self.close)  # the interpreter ends the thread, and then nobody could wait

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; prometheus-client asks for them."""
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge
        from prometheus_client.core import HistogramMetricFamily as Histogram

        names = ["rank", "communicator"]
        stats = list(all_stats(self._session()))
        plain = {
            "calls": Counter("pycoll_calls", "Calls begun.", labels=names),
            "errors": Counter("pycoll_errors", "Errors of the engine.", labels=names),
            "waited_s": Gauge(
                "pycoll_waiting_seconds", "Length of the running wait.", labels=names
            ),
            "symmetric_bytes": Gauge("pycoll_symmetric_bytes", "In arrays.", labels=names),
            "kept_bytes": Gauge("pycoll_symmetric_kept_bytes", "Freed, and kept.", labels=names),
        }
        names = [*names, "collective"]
        traced = {
            "nbytes": Counter("pycoll_collective_bytes", "Bytes of arrays.", labels=names),
            "waited_s": Counter("pycoll_collective_wait_seconds", "For peers.", labels=names),
            "failed": Counter("pycoll_collective_failures", "Calls that raised.", labels=names),
        }
        times = Histogram("pycoll_collective_seconds", "Time of a call.", labels=names)
        for label, one in stats:
            for name, family in plain.items():
                family.add_metric([str(one.rank), label], getattr(one, name))
            for kind, counts in one.collectives.items():
                own = [str(one.rank), label, kind]
                for name, family in traced.items():
                    family.add_metric(own, getattr(counts, name))
                ends = [*map(str, BUCKETS_S), "+Inf"]
                sums = [sum(counts.histogram[: i + 1]) for i in range(len(ends))]
                times.add_metric(own, list(zip(ends, sums, strict=True)), counts.seconds)
        yield from (*plain.values(), *traced.values(), times)

    def close(self) -> None:
        """Serve no longer."""
        atexit.unregister(self.close)
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def all_stats(session: Any) -> Iterator[tuple[str, Stats]]:
    """Yield the counters of a session and of all that was split from it, each with a label.

    A label stays that of its communicator, also when others are closed, and is the same on all
    ranks: ``job``, ``split2`` for the second split of the job, ``split2.1`` for the first of that.
    """
    if session is None or not is_open(session):
        return
    waiting = [("job", "split", session)]
    while waiting:
        label, begin, one = waiting.pop(0)
        try:
            found = [(label, read(one))]
        except CollError:  # closed; what was split from it may be open
            found = []
        yield from found
        for number, child in one.children.copy().items():  # another thread may be splitting it
            waiting.append((f"{begin}{number}", f"{begin}{number}.", child))
