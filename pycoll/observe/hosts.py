"""The status of a job that runs on several hosts: what each of them sees, put together."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.observe.links import LinkState
from pycoll.observe.status import RankStatus, Status, Wait, skewed

RSH = "ssh -o BatchMode=yes"
_MORE_S = 30.0  # that another host may take to answer


def remote_shell(rsh: str) -> list[str]:
    """Return the words of what ``--rsh`` says.

    Raises:
        ArgumentError: If there are none, or they cannot be told apart.
    """
    try:
        words = shlex.split(rsh)
    except ValueError as error:
        raise ArgumentError(f"--rsh is {rsh!r}: {str(error).lower()}") from None
    if not words:
        raise ArgumentError(f"--rsh is {rsh!r}, expected a command such as ssh")
    return words


def ask(key: int, hosts: Sequence[str], rsh: str = RSH) -> list[subprocess.Popen[str]]:
    """Begin to look at a job on other hosts, as ``pycoll status`` does there.

    Args:
        key: What names the job; see `Status.key`.
        hosts: Their names.
        rsh: The remote shell and its options.

    Raises:
        ArgumentError: If the command is not there.
    """
    shell = remote_shell(rsh)
    told = f"{shlex.quote(sys.executable)} -m pycoll status --json --key {key:x}"
    try:
        return [
            subprocess.Popen(
                [*shell, host, told],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in hosts
        ]
    except OSError as error:
        raise ArgumentError(
            f"cannot start {rsh!r}: {error.strerror}; --rsh names another one"
        ) from None


def together(own: Status, hosts: Sequence[str], asked: list[subprocess.Popen[str]]) -> Status:
    """Return a status in which each rank is as its own host sees it.

    Raises:
        ArgumentError: If a host does not answer, or sees another job.
    """
    for host, process in zip(hosts, asked, strict=True):
        own = _joined(own, host, _answer(host, process))
    return replace(own, ranks=skewed(own.ranks))


def _answer(host: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=_MORE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise ArgumentError(f"{host} has not answered for {_MORE_S:g} s") from None
    try:
        return json.loads(out)
    except ValueError:
        why = (err or out).strip() or f"it ended with status {process.returncode}"
        raise ArgumentError(f"{host} cannot tell the status of the job: {why}") from None


def _joined(own: Status, host: str, told: dict[str, Any]) -> Status:
    ranks = [_rank(row, host) for row in told["ranks"]]
    if len(ranks) != len(own.ranks):
        raise ArgumentError(
            f"{host} sees a job of {len(ranks)} ranks, and this host one of {len(own.ranks)}"
        )
    seen = [
        there if here.state == "elsewhere" else here
        for here, there in zip(own.ranks, ranks, strict=True)
    ]
    links = own.links + [LinkState(**row) for row in told["links"]]
    return replace(own, ranks=seen, links=links, failure=own.failure or told["failure"])


def _rank(row: dict[str, Any], host: str) -> RankStatus:
    waits = Wait(**row["waits"]) if row["waits"] else None
    return RankStatus(**row | {"waits": waits, "host": host})
