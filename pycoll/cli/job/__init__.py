"""The processes of ``pycoll run``: started together, watched, ended together; their output.

`processes` is the launcher, `rank_main` what each rank executes; with several hosts `hosts` is the
launcher, and `host_main` what it starts on each. Read `processes` first.
"""
