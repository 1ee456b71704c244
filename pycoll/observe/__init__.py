"""Seeing a job: from outside while it runs, and afterwards from what it has written.

Nothing here writes to the memory of a job. Read in this order: `processes` and `find` (what there
is to see), `boards` (of ranks that send messages), `look` (one look at a job), `shares` (many quick
ones), `links` (connections), `status` (two looks compared), `hosts` (those of several hosts),
`causes` (what is wrong). `counters` are for other programs.
"""
