"""What PyTorch calls when it is imported in a trainer's tests: groups are counted, and changed.

The tests of trainers ask for gloo by its name. With ``IN_PLACE_OF_GLOO=pycoll`` every group that
would be gloo's is one of pycoll's, under the name of gloo. Each group adds a line with its class to
the file that ``GROUPS_MADE`` names.
"""

import functools
import inspect
import os

GLOO = {"gloo", "cpu:gloo", "undefined"}  # "undefined": no backend is named, so gloo for CPUs


def register():
    """Change how PyTorch makes groups; for the entry point ``torch.backends``."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    instead = os.environ.get("IN_PLACE_OF_GLOO")
    if instead:
        import pycoll.torch  # noqa: F401 - registers the backend
    plain = c10d._new_process_group_helper
    order = inspect.signature(plain)

    @functools.wraps(plain)
    def make(*args, **options):
        bound = order.bind(*args, **options)
        asked = bound.arguments["backend"]
        changed = instead and str(asked) in GLOO and not torch.cuda.is_available()
        if changed:
            bound.arguments["backend"] = c10d.Backend(instead)
            bound.arguments["backend_options"] = None  # gloo has none
        group, store = plain(*bound.args, **bound.kwargs)
        if changed and group in c10d._world.pg_map:  # the program is told what it asked for
            c10d._world.pg_map[group] = (asked, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(asked))
        if isinstance(group, c10d.ProcessGroup):
            count(group)
        return group, store

    c10d._new_process_group_helper = make


def count(group):
    """Add a line to the file of groups; many processes do, at once."""
    if path := os.environ.get("GROUPS_MADE"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{type(group).__name__}\n")
