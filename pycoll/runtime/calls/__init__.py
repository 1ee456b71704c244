"""A collective from its arguments to a bound plan: validated, chosen, prepared, run, cached.

`prepare` turns arguments into a `prepared` call, `request` and `specs` describe it, `plans`
compiles and binds, `v_variants` are the calls with different counts, `work` is a call under way.
Uses `arrays` and `selection`. Read `prepare` first.
"""
