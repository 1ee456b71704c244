"""Traces: every call of every rank, written while a job runs, and read afterwards.

`files` is what lies on disk, `record` writes it, `merged` reads it and puts the ranks on one clock,
`chrome` turns it into what Perfetto opens.
"""
