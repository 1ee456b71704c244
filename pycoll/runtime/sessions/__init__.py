"""One rank's side of a communicator, for each transport, and how it ends.

`session` is shared memory, with `p2p` for messages and `background` for queued calls;
`message_session` is MPI and TCP, `two_level_session` several hosts; `reports` turns failures into
errors, `shrink` goes on without the dead, `health` checks. Uses all other folders of the runtime.
Read `session` first.
"""
