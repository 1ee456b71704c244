"""Loading an engine: every rank reads what it needs, on any mesh."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pycoll.errors import ArgumentError, in_words
from pycoll.parallel.channels import Channel
from pycoll.parallel.checkpoint.arguments import checked
from pycoll.parallel.checkpoint.folder import candidates
from pycoll.parallel.checkpoint.manifest import PARAMETERS, Damaged, Manifest
from pycoll.parallel.checkpoint.reader import Reader
from pycoll.parallel.compare import check_same, gather_problems, gather_texts
from pycoll.parallel.engine.data_parallel import DataParallel
from pycoll.parallel.state.parts import hook_kind

_MOST_TRIES = 100  # each of a checkpoint of its own
Found = dict[tuple[str, str, int, int], Any]


@dataclass(frozen=True)
class Loaded:
    """What was loaded; true if anything was.

    Attributes:
        path: The checkpoint.
        steps: Steps that had been taken when it was saved.
        extra: What the program had added.
    """

    path: str
    steps: int
    extra: Any

    def __bool__(self) -> bool:
        return bool(self.path)


def load(
    path: str | os.PathLike[str],
    engine: DataParallel,
    *,
    states: bool = True,
    if_any: bool = False,
) -> Loaded:
    """Load what `save` wrote into an engine of any mesh, stage and precision; a collective.

    All files are compared with their hashes first, each by one rank; nothing has changed if this
    raises.

    Args:
        path: A folder of checkpoints, of which the newest that is undamaged is taken, with a
            warning for each that is not; or one checkpoint.
        engine: An engine for the same model, which may be split in another way.
        states: False: only parameters are loaded; states of the optimizer are zero, and steps are
            counted from 0.
        if_any: True: where there is no checkpoint at all, nothing is loaded, and the path that is
            returned is empty; for a program that is started again until it is through.

    Raises:
        ArgumentError: On every rank, if there is no undamaged checkpoint, or it does not fit.
        MismatchError: On every rank, if they read different ones, or have other arguments.
    """
    folder = checked(path, engine, "load", if_any=bool(if_any))
    world, damage = engine.groups.world, ""
    paths = _candidates(folder, world, if_any)
    tried: list[str] = []
    while paths:
        found = paths[0]
        if damage:
            warnings.warn(f"{damage}; {found} is tried next", RuntimeWarning, stacklevel=2)
        try:
            return _load(found, engine, states)
        except Damaged as error:
            damage = str(error)
        tried.append(found)
        # Another job may have saved a newer one meanwhile, and deleted this one.
        again = _candidates(folder, world, True) if len(tried) < _MOST_TRIES else paths
        paths = [path for path in again if path not in tried]
    if damage:
        raise ArgumentError(f"no checkpoint was loaded: {damage}. Nothing was changed")
    return Loaded("", 0, None)


def _load(path: str, engine: DataParallel, states: bool) -> Loaded:
    """Load one checkpoint; a collective.

    Raises:
        Damaged: On every rank, if a rank cannot read it.
        ArgumentError: On every rank, if it does not fit.
    """
    world, problem, reader = engine.groups.world, None, None
    with ExitStack() as stack:
        try:
            reader = stack.enter_context(Reader(path))
            reader.verify(world.rank, world.world_size)
        except Exception as error:
            problem = error
        _raise_any(path, problem, world)
        assert reader is not None
        _take(reader, engine, states)
        return Loaded(path, reader.manifest.steps, reader.manifest.extra)


def _raise_any(path: str, error: Exception | None, world: Channel) -> None:
    """Raise what any rank has on every rank; a collective."""
    text = str(error) if isinstance(error, ArgumentError) else in_words(error) if error else ""
    if not (problems := gather_problems(text, world)):
        return
    if damages := gather_problems(text if isinstance(error, Damaged) else "", world):
        raise Damaged(damages)
    raise ArgumentError(f"{path} was not loaded: {problems}. Nothing was changed")


def _candidates(path: str, world: Channel, if_any: bool) -> list[str]:
    """Return what the first rank finds; a collective."""
    text, problem, hint = "", "", "; with if_any=True a program begins without one"
    try:
        if world.rank == 0:
            text = json.dumps(candidates(path, if_any, hint))
    except Exception as error:
        problem = str(error) if isinstance(error, ArgumentError) else in_words(error)
    text, problem = (gather_texts(t, world)[0] for t in (text, problem))
    if problem:
        raise ArgumentError(problem)
    found: list[str] = json.loads(text)
    return found


def _take(reader: Reader, engine: DataParallel, states: bool) -> None:
    """Read all that this rank needs, agree that every rank could, and change the engine."""
    manifest, groups, problem, refused = reader.manifest, engine.groups, None, ""
    values: Found = {}
    scale, before = engine.loss_scale, engine.hook.state()
    try:
        if states:
            scale = scale.resumed(manifest.loss_scale)
        check_fit(manifest, engine, states)
        for part in engine.wanted():
            if states or part.kind == PARAMETERS:
                values[part.kind, part.name, part.start, part.stop] = reader.part(part)
        refused = _load_hook(reader, engine, states)
    except Exception as error:
        problem = error
    try:
        _raise_any(reader.path, problem, groups.world)
        if refusals := gather_problems(refused, groups.world):
            warnings.warn(f"what a hook had not sent is left out: {refusals}", RuntimeWarning, 4)
            engine.hook.load({})
        facts = [f"{states=}", manifest.to_json()]
        check_same(facts, "checkpoints or states=, so none was loaded", groups.world)
    except Exception:
        engine.hook.load(before)
        raise
    engine.take(lambda *key: values.get(key), manifest.steps if states else 0, scale)


def check_fit(manifest: Manifest, engine: DataParallel, states: bool) -> None:
    """Refuse a checkpoint of another model or optimizer, naming the first array that differs."""
    for part in engine.wanted():
        if not states and part.kind != PARAMETERS:
            continue
        tensor = manifest.tensors.get(part.kind, {}).get(part.name)
        if tensor is None:
            kinds = ", ".join(manifest.tensors)
            raise ArgumentError(
                f"no {part.kind} of parameter {part.name}; the checkpoint has {kinds}"
                + ("" if part.kind == PARAMETERS else "; states=False loads parameters only")
            )
        if tensor.shape != part.shape:
            raise ArgumentError(
                f"parameter {part.name} of shape {part.shape}, saved is {tensor.shape}"
            )
    own = {parameter.name for parameter in engine.parameters}
    if unknown := sorted(manifest.tensors.get(PARAMETERS, {}).keys() - own):
        raise ArgumentError(f"no parameters {', '.join(unknown)}, which were saved")


def _load_hook(reader: Reader, engine: DataParallel, states: bool) -> str:
    """Give the hook what it had not sent here, if that was saved; return why it refuses it."""
    kind = hook_kind(engine.groups.place, engine.buckets)
    names = reader.manifest.tensors.get(kind, {}) if states else {}
    try:
        engine.hook.load({name: reader.whole(kind, name) for name in names})
    except Damaged:
        raise
    except ArgumentError as error:
        return str(error)
    return ""
