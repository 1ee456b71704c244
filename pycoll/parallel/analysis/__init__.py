"""Bytes and memory of a run: predicted without running it, and counted while it runs.

`estimate` predicts from `dry_run`, `ledger` counts what happens, `metered` counts a communicator's
calls. Read `ledger` first.
"""
