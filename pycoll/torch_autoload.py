"""What PyTorch calls when it is imported where pycoll is installed: makes the backend known.

It stands alone, so that PyTorch can be imported whatever is wrong with pycoll.
"""

from __future__ import annotations

import importlib
import warnings


def register() -> None:
    """Make ``"pycoll"`` known to ``torch.distributed``, or warn why not."""
    try:
        importlib.import_module("pycoll.torch")
    except Exception as error:  # an error here would be one of `import torch`
        warnings.warn(
            f"torch.distributed does not get the backend pycoll: {error}", RuntimeWarning, 2
        )
