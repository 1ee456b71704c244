"""Checkpoints: every rank writes what it is responsible for, and any mesh reads it.

`folder` has the names and the rename that makes a checkpoint whole, `manifest` what is where,
`hashes` what bytes are known by, `writer` saves an engine, `reader` reads arrays, `loader` fills an
engine, `reshard` writes other files. Uses `state.parts` and `compare`. Read `folder` first.
"""

from pycoll.parallel.checkpoint.loader import Loaded, load
from pycoll.parallel.checkpoint.reshard import reshard
from pycoll.parallel.checkpoint.writer import Saving, save

__all__ = ["Loaded", "Saving", "load", "reshard", "save"]
