"""``pycoll checkpoint``: show, verify or rewrite a checkpoint of a training run."""

from __future__ import annotations

import argparse
import os

from pycoll.cli.common.text import show_size, table
from pycoll.errors import ArgumentError
from pycoll.parallel.checkpoint.folder import candidates
from pycoll.parallel.checkpoint.manifest import Damaged, Manifest
from pycoll.parallel.checkpoint.reader import Reader
from pycoll.parallel.checkpoint.reshard import reshard
from pycoll.parallel.precision import dtype_of


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``checkpoint`` to the command line."""
    parser = subparsers.add_parser(
        "checkpoint", description="Show, verify or rewrite a checkpoint of a training run."
    )
    add = parser.add_argument
    actions = "show: list the arrays; verify: compare all bytes with their hashes; "
    add(
        "action",
        choices=("show", "verify", "reshard"),
        help=actions + "reshard: write each array in one piece, in other files",
    )
    add("path", help="a checkpoint, or a folder of checkpoints, of which the newest is taken")
    add(
        "-o",
        "--output",
        help="folder that gets the new checkpoint, for reshard (default PATH-resharded)",
    )
    add("--files", type=int, default=1, help="number of its files, for reshard (default 1)")


def main(args: argparse.Namespace) -> int:
    """Do it; 1 if a checkpoint is damaged."""
    if args.action != "reshard" and (args.output is not None or args.files != 1):
        raise ArgumentError(f"--output and --files are for reshard, not for {args.action}")
    try:
        if args.action == "reshard":
            output = args.output or f"{os.path.normpath(args.path)}-resharded"
            print(reshard(args.path, output, args.files))
            return 0
        path = candidates(args.path)[0]
        with Reader(path) as reader:
            if args.action == "show":
                print(f"{path}\n\n{listing(reader.manifest)}")
            else:
                nbytes = reader.verify()
                files = _count_files(reader.manifest)
                print(f"{path}: {files}, {show_size(nbytes)}, all as they were written")
    except Damaged as error:
        print(f"damaged: {error}")
        return 1
    return 0


def listing(manifest: Manifest) -> str:
    """Return what a checkpoint has as text."""
    axes = ", ".join(f"{axis}={size}" for axis, size in manifest.mesh.items()) or "one process"
    rows, total = [], 0
    for kind, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            nbytes = tensor.size * dtype_of(tensor.dtype).itemsize
            total += nbytes
            shape = " x ".join(map(str, tensor.shape))
            size, pieces = show_size(nbytes), str(len(tensor.pieces))
            rows.append((kind, name, tensor.dtype, shape, size, pieces))
    head = ("kind", "name", "type", "shape", "bytes", "pieces")
    return (
        f"{manifest.steps} steps, saved by {axes}; {show_size(total)} in "
        f"{_count_files(manifest)}\n\n{table(head, rows, right=(3, 4, 5))}"
    )


def _count_files(manifest: Manifest) -> str:
    count = len(manifest.files)
    return f"{count} file{'s' * (count != 1)}"
