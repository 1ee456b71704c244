"""Bytes and memory of a run, predicted without running it.

`estimate` is the interface, and `planner` searches with it for the fastest mesh of a `workload`;
`dry_run` runs a step of the engine on arrays without elements. Uses
`engine`, `state` and `channels`. Read `estimate` first.
"""
