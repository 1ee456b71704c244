"""The processes of ``pycoll run``: started together, watched, ended together; their output.

`processes` is the launcher, `rank_main` what each rank executes. Read `processes` first.
"""
