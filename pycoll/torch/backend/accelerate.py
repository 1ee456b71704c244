"""The backend by its name in Accelerate, and so in Transformers' ``ddp_backend``."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODULE = "accelerate.state"


def offer_to_accelerate(name: str) -> None:
    """Let Accelerate take a backend on CPU, now or when it is imported.

    Accelerate takes gloo there whatever is asked for, and then refuses what was.
    """

    def change(state: ModuleType) -> None:
        plain = getattr(getattr(state, "PartialState", None), "_prepare_backend", None)
        if plain is None:  # another version: it stays as it is
            return
        arguments = inspect.signature(plain)

        @functools.wraps(plain)
        def prepare(*args: Any, **options: Any) -> Any:
            found = plain(*args, **options)
            asked = arguments.bind(*args, **options).arguments.get("backend")
            return (name, *found[1:]) if asked == name and found[0] == "gloo" else found

        state.PartialState._prepare_backend = prepare

    if _MODULE in sys.modules:
        change(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Watch(_MODULE, change))


class _Watch(MetaPathFinder):
    """Shows a module to a function right after its first import."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def show(module: ModuleType) -> None:
            load(module)
            self._then(module)

        spec.loader.exec_module = show  # type: ignore[method-assign]
        return spec
