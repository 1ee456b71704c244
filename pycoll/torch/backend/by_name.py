"""The backend by its name in trainers that have a list of names.

In Accelerate, and so in Transformers' ``ddp_backend``, and in Ignite.
"""

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

Change = Callable[[ModuleType], None]


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

    _when_imported("accelerate.state", change)


def offer_to_ignite(name: str) -> None:
    """Let ``ignite.distributed`` take a backend, now or when it is imported.

    Ignite takes gloo, NCCL and MPI, and refuses all other names. Its ``auto_model`` makes a DDP
    model for those three only: it is told gloo.
    """

    def change(native: ModuleType) -> None:
        model = getattr(native, "_NativeDistModel", None)
        known = getattr(model, "available_backends", None)
        if isinstance(known, tuple) and name not in known:  # not another version
            model.available_backends = (*known, name)

    def tell(auto: ModuleType) -> None:
        if hasattr(getattr(auto, "idist", None), "backend"):
            auto.idist = _Renamed(auto.idist, name)

    _when_imported("ignite.distributed.comp_models.native", change)
    _when_imported("ignite.distributed.auto", tell)


class _Renamed:
    """A module in which the function ``backend`` says gloo instead of a name."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._module, attribute)

    def backend(self) -> str | None:
        found = self._module.backend()
        return "gloo" if found == self._name else found


def _when_imported(module: str, change: Change) -> None:
    """Change a module, now or right after its first import."""
    if module in sys.modules:
        change(sys.modules[module])
    else:
        sys.meta_path.insert(0, _Watch(module, change))


class _Watch(MetaPathFinder):
    """Shows a module to a function right after its first import."""

    def __init__(self, name: str, then: Change) -> None:
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
