"""Counters of a communicator, and where they go.

`stats` reads them, `metrics` serves them to Prometheus, `telemetry` offers them to OpenTelemetry.
"""
