"""Saving an engine: every rank writes its parts, the first makes them one checkpoint."""

from __future__ import annotations

import atexit
import json
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError, in_words
from pycoll.parallel.arrays import as_numpy
from pycoll.parallel.channels import Channel
from pycoll.parallel.checkpoint.arguments import checked
from pycoll.parallel.checkpoint.folder import (
    MANIFEST,
    alone,
    begin,
    commit,
    discard,
    partial_path,
    sync,
    whole_path,
)
from pycoll.parallel.checkpoint.hashes import fastest, hash_of
from pycoll.parallel.checkpoint.manifest import Manifest, Piece, Tensor
from pycoll.parallel.checkpoint.reader import safetensors
from pycoll.parallel.compare import check_same, gather_problems, gather_texts
from pycoll.parallel.engine.data_parallel import DataParallel
from pycoll.parallel.settings import refusal
from pycoll.parallel.state.parts import Part, hook_kind

Tensors = dict[str, dict[str, Tensor]]
Pair = tuple[Part, Part]  # where to copy to, and what


def save(
    path: str | os.PathLike[str],
    engine: DataParallel,
    *,
    keep: int | None = None,
    extra: Any = None,
    background: bool = False,
) -> Saving:
    """Save parameters, optimizer states and step of an engine; a collective.

    Every rank writes a file with what it is responsible for, so ranks have to see one file system.
    See docs/checkpoints.md for what is in the files.

    Args:
        path: Folder of the checkpoints of this engine; made if it is missing. It gets a new one,
            named after the number of the save and of the steps.
        engine: `DataParallel`, `Pipeline`, or that of `pycoll.torch`. A save of it that goes on in
            the background is waited for first.
        keep: Delete all but the newest `keep` afterwards; None: none.
        extra: Anything that JSON can express, the same on every rank, such as the state of a
            `Sampler`; `load` returns it.
        background: Return at once; a thread copies what is to be written, and writes it. The
            engine waits before it changes what is not yet copied. The memory of the copy is kept
            for the next one, until the engine is closed.

    Returns:
        The save; its `wait` returns the path of the checkpoint.

    Raises:
        ArgumentError: On every rank, if one cannot write. What was saved before is untouched.
        MismatchError: On every rank, if they have different steps or extras, or other arguments.
    """
    wrong = "" if keep is None else refusal("keep", keep, "[1, inf)", whole=True)
    folder = checked(path, engine, "save", wrong, keep=keep, background=bool(background))
    if engine.saving is not None:
        engine.saving.settle(engine.groups.world)
    parts, places = _parts(engine, background)
    state = Manifest(
        engine.steps,
        engine.scaling,
        dict(engine.mesh.axes),
        extra,
    )
    job = _Job(folder, parts, state, keep)
    if not background:
        return Saving(lambda: job.run(engine.groups.world))
    if not os.path.isabs(folder):  # the program may go elsewhere meanwhile
        job.path = os.path.join(os.getcwd(), folder)
    engine.saving = _in_background(job, engine, places)
    return engine.saving


def _parts(engine: DataParallel, background: bool) -> tuple[list[Part], list[Part]]:
    """Return what to save, and in the background memory for copies of it; a collective."""
    parts, places, problem = list[Part](), list[Part](), ""
    try:
        parts = [part._replace(data=as_numpy(part.data)) for part in engine.parts()]
        places = _places(parts, engine.saving) if background else []
    except MemoryError as error:
        problem = in_words(error)
    _raise_any(problem, engine.groups.world)
    return parts, places


def _in_background(job: _Job, engine: DataParallel, places: list[Part]) -> Saving:
    """Start a save in the background: what only an update changes is copied there as well."""
    # backward passes change what a hook has not sent
    fleeting = {hook_kind(engine.groups.place, engine.buckets)}
    if engine.EXPOSED:
        fleeting.add("parameters")
    soon: list[Pair] = []
    later: list[Pair] = []
    for pair in zip(places, job.parts, strict=True):
        (soon if pair[0].kind in fleeting else later).append(pair)
    job.parts = places
    channel = Channel(engine.groups.world.comm.dup(), "checkpoint", engine.ledger)
    _copy(soon)
    return Saving(lambda: job.run_and_close(channel), partial(_copy, later), places)


def _copy(pairs: Sequence[Pair]) -> None:
    for place, part in pairs:
        np.copyto(place.data, part.data)


def _places(parts: list[Part], last: Saving | None) -> list[Part]:
    """Return parts to copy others to: those of the last save, if they are still as large.

    New memory takes more than twice as long, as each of its pages has to be made.
    """
    places = [] if last is None else [part.data for part in last.parts]
    if [(x.shape, x.dtype) for x in places] != [(p.data.shape, p.data.dtype) for p in parts]:
        places = [np.empty_like(part.data) for part in parts]
    return [part._replace(data=place) for place, part in zip(places, parts, strict=True)]


class Saving:
    """A save, which may go on in the background.

    Attributes:
        parts: Copies that it writes; the next save in the background uses their memory.
        copied: Set once the engine may change what is saved.
    """

    def __init__(
        self,
        work: Callable[[], str],
        copy: Callable[[], None] | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        """Save: now, or with something to copy first in the background."""
        self._path, self._work = "", work
        self.parts: Sequence[Part] = parts
        self.copied: threading.Event = threading.Event()
        self._error: BaseException | None = None
        self._heard = False  # its end, by who can tell of an error
        self._thread: threading.Thread | None = None
        if copy is None:
            self._path = work()
            self.copied.set()
        else:
            self._thread = threading.Thread(
                target=self._run, args=(copy,), name="pycoll checkpoint"
            )
            self._thread.start()

    def _run(self, copy: Callable[[], None]) -> None:
        try:
            copy()  # an update may wait for it, so not at a low priority
            self.copied.set()
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, max(10, os.getpriority(os.PRIO_PROCESS, own)))
            self._path = self._work()
        except BaseException as error:
            self._error = error
            atexit.register(self._tell)
        finally:
            self.copied.set()

    def _tell(self) -> None:
        """Warn at the end of the program: nothing has waited for this save."""
        warnings.warn(f"a save in the background failed: {self._error}", RuntimeWarning, 1)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> str:
        """Wait for its end and return the path of the checkpoint.

        Raises:
            ArgumentError: If a rank could not write; and what else `save` raises.
        """
        self.failure()
        if self._error is not None:
            raise self._error
        return self._path

    def failure(self) -> BaseException | None:
        """Wait for its end; return what went wrong if nobody here has heard of it before."""
        if self._thread is not None:
            self._thread.join()
        heard, self._heard = self._heard, True
        if heard or self._error is None:
            return None
        atexit.unregister(self._tell)
        return self._error

    def settle(self, world: Channel) -> None:
        """Wait for its end before the next one begins; a collective.

        Args:
            world: The channel of all ranks of the engine.

        Raises:
            ArgumentError: On every rank, if one went wrong and a rank has not heard of it.
        """
        error = self.failure()
        if problems := gather_problems("" if error is None else in_words(error), world):
            last = ArgumentError(f"the last save in the background failed: {problems}")
            raise self._error or last


@dataclass
class _Job:
    """One save on this rank."""

    path: str
    parts: list[Part]
    state: Manifest
    keep: int | None

    def run_and_close(self, channel: Channel) -> str:
        """Save by way of a channel of its own."""
        with channel.comm:
            return self.run(channel)

    def run(self, world: Channel) -> str:
        """Save; a collective of the ranks of `world`. Return the path of the checkpoint."""
        with ExitStack() as stack:
            return self._run(world, stack)

    def _run(self, world: Channel, stack: ExitStack) -> str:
        name, problem = "", ""
        try:
            facts = [self.state.to_json()]
            safetensors()
            if world.rank == 0:
                stack.enter_context(alone(self.path))
                name = begin(self.path, self.state.steps)
        except Exception as error:  # also what `extra` raises: the other ranks wait
            facts, problem = [], in_words(error)
        try:
            _raise_any(problem, world)
            check_same(facts, "steps or extras to save", world)
            found = gather_texts(name, world)[0]
            self._write(found, world)
        except BaseException:
            if name:
                discard(self.path, name)
            raise
        return whole_path(self.path, found)

    def _write(self, name: str, world: Channel) -> None:
        """Write the files of the checkpoint that was begun, and make it whole; a collective."""
        folder, problem, pieces = partial_path(self.path, name), "", {}
        try:
            file = f"rank-{world.rank:05d}-of-{world.world_size:05d}.safetensors"
            pieces = write_file(folder, file, self.parts)
        except Exception as error:
            problem = in_words(error)
        _raise_any(problem, world)
        written = gather_texts(json.dumps(as_lists(pieces)), world)
        try:
            if world.rank == 0:
                finish(self.path, name, self.state, map(json.loads, written), self.keep)
        except Exception as error:
            problem = in_words(error)
        _raise_any(problem, world)


def _raise_any(problem: str, world: Channel) -> None:
    if problems := gather_problems(problem, world):
        raise ArgumentError(f"the checkpoint was not saved: {problems}")


def write_file(folder: str, file: str, parts: Iterable[Part]) -> Tensors:
    """Write parts to a file, until they are on the disk; return where they are.

    A part that is a whole box has its shape, another one is flat. No parts, no file.
    """
    arrays: dict[str, np.ndarray] = {}
    found: Tensors = {}
    for part in parts:
        extent = tuple(b - a for a, b in part.box)
        data = np.ascontiguousarray(part.data)
        key = f"{part.kind}/{part.name}"
        whole = part.stop - part.start == np.prod(extent, dtype=int)
        arrays[key] = data.reshape(extent) if whole else data
        piece = Piece(file, key, part.box, part.start, part.stop, "")
        tensor = Tensor(data.dtype.name, part.shape, (piece,))
        found.setdefault(part.kind, {})[part.name] = tensor
    if not arrays:
        return {}
    path = os.path.join(folder, file)
    _save_file(arrays, path)
    with ThreadPoolExecutor(1) as pool:  # one thread waits for the disk, this one makes the hashes
        try:
            wait = pool.submit(sync, path).result
        except RuntimeError:  # the program ends, and no thread can be started any more
            wait = partial(sync, path)
        kind = fastest()
        hashes = {key: hash_of(array, kind) for key, array in arrays.items()}
        wait()
    for tensors in found.values():
        for name, tensor in tensors.items():
            (piece,) = tensor.pieces
            hashed = Piece(**asdict(piece) | {"hash": hashes[piece.key], "box": piece.box})
            tensors[name] = Tensor(tensor.dtype, tensor.shape, (hashed,))
    return found


def _save_file(arrays: dict[str, np.ndarray], path: str) -> None:
    """Write a file of safetensors with the permissions that the program gives to new files."""
    library = safetensors()
    with open(path, "wb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        library.numpy.save_file(arrays, path)  # in a temporary file, which is private
    except library.SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    os.chmod(path, mode)


def finish(
    path: str, name: str, state: Manifest, written: Iterable[Any], keep: int | None = None
) -> None:
    """Join what was written, as lists and dictionaries, write the manifest, and commit."""
    joined: dict[str, dict[str, Any]] = {}
    for tensors in written:
        for kind, found in tensors.items():
            for array, tensor in found.items():
                known = joined.setdefault(kind, {}).setdefault(array, tensor | {"pieces": []})
                known["pieces"] += tensor["pieces"]
    folder = partial_path(path, name)
    manifest = Manifest(state.steps, state.loss_scale, state.mesh, state.extra, joined)
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
        file.write(manifest.to_json())
    sync(os.path.join(folder, MANIFEST))
    missing = [f for f in Manifest.read(folder).files if not os.path.exists(f"{folder}/{f}")]
    if missing:
        raise ArgumentError(
            f"{', '.join(missing)} of other ranks cannot be seen in {folder}; all ranks have to "
            "write to one file system"
        )
    commit(path, name, keep)


def as_lists(tensors: Tensors) -> dict[str, dict[str, Any]]:
    """Return what was written in the form that `finish` joins."""
    return {
        kind: {name: asdict(tensor) for name, tensor in found.items()}
        for kind, found in tensors.items()
    }
