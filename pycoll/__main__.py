"""``python -m pycoll`` is the command ``pycoll``."""

import sys

from pycoll.cli import main

sys.exit(main())
