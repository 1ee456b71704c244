"""Calls of several parts: what ranks tell each other first, then what they move.

`exchange` has the few bytes that ranks tell each other on behalf of a call; `v_variants` are
collectives whose blocks differ in size, `said_sizes` what ranks say of these, `repeated` calls like
an earlier one; `objects` are calls on Python objects, which `encoding` turns into bytes. Uses the
calls around it, and sessions, which run them. Read `exchange` first.
"""
