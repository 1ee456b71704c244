"""Counters for OpenTelemetry, read when its reader asks for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.observe.counters.metrics import all_stats

PLAIN = {
    "pycoll.calls": ("counter", "calls", "{call}", "Calls begun."),
    "pycoll.errors": ("counter", "errors", "{error}", "Errors of the engine."),
    "pycoll.waiting": ("gauge", "waited_s", "s", "Length of the running wait."),
    "pycoll.symmetric": ("gauge", "symmetric_bytes", "By", "Symmetric memory in arrays."),
    "pycoll.symmetric.kept": ("gauge", "kept_bytes", "By", "Symmetric memory freed, and kept."),
}
"""Instruments of a communicator: kind, attribute of `Stats`, unit and description."""
TRACED = {
    "pycoll.collective.calls": ("counter", "calls", "{call}", "Calls of a collective."),
    "pycoll.collective.bytes": ("counter", "nbytes", "By", "Bytes of arrays."),
    "pycoll.collective.time": ("counter", "seconds", "s", "Time in calls."),
    "pycoll.collective.wait": ("counter", "waited_s", "s", "Of that, for peers."),
    "pycoll.collective.failures": ("counter", "failed", "{call}", "Calls that raised."),
}
"""Likewise of a collective, while calls are traced: attributes of `Counts`."""


def export(session: Any, meter: Any = None) -> None:
    """Offer the counters of a session, and of those split from it, to a meter of OpenTelemetry.

    Args:
        session: The communicator of all ranks.
        meter: An ``opentelemetry.metrics.Meter``; by default that of the global provider.

    Raises:
        ArgumentError: If OpenTelemetry is missing.
    """
    try:
        from opentelemetry.metrics import Observation, get_meter
    except ModuleNotFoundError:
        raise ArgumentError(
            "export_metrics needs OpenTelemetry: pip install opentelemetry-sdk"
        ) from None
    meter = get_meter("pycoll") if meter is None else meter
    known = weakref.ref(session)

    def reader(name: str, traced: bool) -> Callable[[Any], Iterator[Any]]:
        def read(_options: Any) -> Iterator[Any]:
            for label, one in all_stats(known()):
                about = {"rank": one.rank, "communicator": label}
                if not traced:
                    yield Observation(getattr(one, name), about)
                    continue
                for kind, counts in one.collectives.items():
                    yield Observation(getattr(counts, name), about | {"collective": kind})

        return read

    for group in (PLAIN, TRACED):
        for name, (kind, attribute, unit, text) in group.items():
            make = getattr(meter, f"create_observable_{kind}")
            make(name, callbacks=[reader(attribute, group is TRACED)], unit=unit, description=text)
