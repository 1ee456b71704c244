"""A collective from its arguments to a bound plan: validated, chosen, prepared, run, cached.

`prepare` turns the arguments into a `prepared` call, `plans` compiles and binds, `work` is a call
in the background, `methods` declares the collectives of a communicator; `parts` has calls of
several parts. Uses `arrays` and `selection`. Read `prepare` first.
"""
