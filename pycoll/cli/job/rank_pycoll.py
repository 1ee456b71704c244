"""What ranks of ``pycoll bench`` and ``pycoll tune`` execute: pycoll's own command line.

It is started by its path, as a script, and takes the package that it belongs to. With ``-m pycoll``
a rank would take whatever has that name in the current directory, and the modules of others that
lie there instead of those that Python has by the same names.
"""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this folder, whose modules have common names

import importlib.util
from pathlib import Path


def main() -> int:
    """Load the package from where this file lies, and run its command line."""
    place = Path(__file__).resolve().parents[2] / "__init__.py"
    spec = importlib.util.spec_from_file_location("pycoll", place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} cannot be loaded")
    sys.modules["pycoll"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["pycoll"])
    from pycoll.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
