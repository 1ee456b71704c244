"""Two hosts that are network namespaces of this one, joined by a cable."""

import contextlib
import os
import shutil
import subprocess

import pytest

CABLE, NET = "pct", "10.78.0"


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@contextlib.contextmanager
def two_hosts():
    """Make them, and yield their names; skip the test where that cannot be."""
    names = [f"pct{os.getpid()}{end}" for end in "ab"]
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("it needs root, iproute2 and util-linux")
    made = [ip("netns", "add", name) for name in names]
    try:
        if failed := [m.stderr for m in made if m.returncode]:
            pytest.skip(f"no network namespaces: {failed[0].strip()}")
        a, b = names
        made = ip("link", "add", CABLE, "netns", a, "type", "veth", "peer", CABLE, "netns", b)
        if made.returncode:
            pytest.skip(f"no links between them: {made.stderr.strip()}")
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{NET}.{i + 1}/24", "dev", CABLE)
            for link in ("lo", CABLE):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def addresses(hosts):
    """Return the addresses of hosts."""
    return [f"{NET}.{i + 1}" for i in range(len(hosts))]


def remote_shell(folder, hosts):
    """Write a program that runs a command on the host with an address, as ssh does; return it."""
    cases = [f"{at}) name={name};;" for at, name in zip(addresses(hosts), hosts, strict=True)]
    path = folder / "shell"
    path.write_text(
        "\n".join(["#!/bin/sh", 'case "$1" in', *cases, "esac", "shift"])
        + '\nexec ip netns exec $name unshare --ipc sh -c "$*"\n'
    )
    path.chmod(0o755)
    return str(path)
