"""How ranks find each other: launcher, hosts, shared memory, TCP connections, MPI.

`bootstrap` finds out which rank this is, `rendezvous` waits for all, `hosts` tells hosts apart,
`tcp_*` connect hosts without MPI (read `tcp_job` first), `mpi` starts from mpi4py, `make_groups`
makes communicators.
Read `bootstrap` first.
"""
