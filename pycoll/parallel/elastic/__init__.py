"""Training that goes on when ranks die and come back: one loop around an engine.

`run` is the loop, `copies` keeps what a dead rank would take with it, `transfer` brings a state to
a new engine, `share` divides a step. Uses `engine`, `state` and the communicator's `grow`. Read
`run` first.
"""
