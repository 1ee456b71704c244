"""Training with a parameter server: workers push gradients, servers answer with parameters.

`parameter_server` is what a program uses, `serving` the loop of a server, `worker` what a worker
sends and receives, `placing` which bucket is where. Uses `state`, `engine` and messages of the
communicator. Read `parameter_server` first.
"""
