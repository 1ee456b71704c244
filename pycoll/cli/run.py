"""``pycoll run``: start the ranks of a job on this host, watch them, and end them together."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from pycoll.cli.common.arguments import check_writable
from pycoll.cli.job.elastic import ElasticJob
from pycoll.cli.job.hosts import HostsJob
from pycoll.cli.job.processes import Job
from pycoll.cli.job.topology import shares, topology
from pycoll.cli.job.wakeup import woken_by_signals
from pycoll.config import Config, environment
from pycoll.errors import ArgumentError
from pycoll.runtime.startup.room import check_job

_RANK_PYCOLL = str(Path(__file__).with_name("job") / "rank_pycoll.py")
RESTARTS = 10
MAX_RANKS = 4096  # kMaxWorldSize of csrc/memory/control.h: more than that no communicator takes


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``run`` to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="start the ranks of a job",
        usage="pycoll run -n N [--hosts A,B] [--timeout S] [--tag-output] "
        "[--keep-going | --elastic] [--bind] [--trace DIR] "
        "(script.py | -m module | -c program) [args ...]",
        description="Start N processes that run one script. The first failure ends the job, unless "
        "it is to keep going, and so does the end of the launcher; its exit status is that of the "
        "rank that failed first. A signal is passed on to the ranks: those that still run half a "
        "minute later are killed, and at once when it comes again (Ctrl-C twice). So are stopped "
        "ranks that nobody continues after all others have ended. SIGUSR1 and SIGUSR2 reach the "
        "ranks, and end nothing by themselves.",
    )
    parser.add_argument(
        "-n",
        "-np",
        type=_number_of_ranks,
        metavar="N",
        help=f"number of ranks, at most {MAX_RANKS}; with --elastic also from..to, such as 2..8",
    )
    _add_places(parser)
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds")
    parser.add_argument("--tag-output", action="store_true", help="print [rank] before each line")
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="let the others go on when a rank fails, with Communicator.shrink; "
        "the job has failed if none ends well, or one fails because of another",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="start ranks again that die, and let them join the others, with Communicator.grow; "
        "with -n 2..8 eight are started, and go on while two are left",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        metavar="R",
        help=f"with --elastic: how often ranks are started again, over all ({RESTARTS})",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="DIR", help="write every call; `pycoll report DIR` reads it"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module")
    parser.add_argument("-c", dest="text", nargs=argparse.REMAINDER, help="run a program text")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="script and its arguments")


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts",
        metavar="A,B",
        help="start the ranks on these hosts, in blocks: over ssh, with pycoll at the same place",
    )
    parser.add_argument(
        "--rsh", default="ssh", metavar="CMD", help="with --hosts: what to use in place of ssh"
    )
    parser.add_argument(
        "--bind",
        action="store_true",
        help="bind each rank to whole cores of its own; neighbouring ranks to neighbouring ones",
    )


def main(args: argparse.Namespace) -> int:
    """Run the job and return its exit status."""
    if args.n is None:
        raise ArgumentError(
            "how many ranks? pycoll run -n N script.py args...; what follows the script is for it"
        )
    command, (least, most) = _command(args), args.n
    if most < least:
        raise ArgumentError(f"-n is {least}..{most}, expected the fewest ranks first, as in 2..8")
    if least < 1:
        raise ArgumentError(f"-n is {_written(args.n)}, expected at least 1 rank")
    if most > MAX_RANKS:
        raise ArgumentError(
            f"-n is {_written(args.n)}, expected at most {MAX_RANKS} ranks, the most of one "
            "communicator"
        )
    restarts = _restarts(args)
    if args.timeout is not None and not args.timeout > 0:
        raise ArgumentError(f"--timeout is {args.timeout}, expected a number of seconds > 0")
    if args.trace is not None:
        check_writable("--trace", args.trace / "trace")
        environment()["PYCOLL_TRACE"] = str(args.trace.absolute())
    config = Config.from_env()
    if config.transport == "mpi":  # say once what every rank would say
        raise ArgumentError(
            "PYCOLL_TRANSPORT is mpi: start the ranks with mpiexec, not with `pycoll run`"
        )
    hosts = _hosts(args, most)
    check_job(1 if hosts else most, config)
    with woken_by_signals() as wakeup:
        job: Job | HostsJob
        if hosts:
            job = HostsJob(hosts, most, args.rsh, args.timeout, wakeup)
        elif args.elastic:
            job = ElasticJob(least, most, restarts, args.timeout, wakeup)
        else:
            job = Job(most, args.timeout, wakeup, args.keep_going)
        if args.bind and isinstance(job, Job):
            job.cpus = shares(topology(), most)
        try:
            job.start(command, args.tag_output)
            job.watch()
        except BrokenPipeError:  # whoever read our output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        finally:
            job.close()
    return job.conclude()


def _restarts(args: argparse.Namespace) -> int:
    """Return how often ranks are started again; refuse what does not go with --elastic."""
    if (args.n[0] < args.n[1] or args.restarts is not None) and not args.elastic:
        raise ArgumentError("-n from..to and --restarts are for --elastic")
    if args.elastic and args.keep_going:
        raise ArgumentError("--elastic keeps going anyway: leave --keep-going out")
    restarts = RESTARTS if args.restarts is None else args.restarts
    if restarts < 0:
        raise ArgumentError(f"--restarts is {restarts}, expected a number of restarts, 0 or more")
    return restarts


def main_of_pycoll(n: int, words: list[str]) -> int:
    """Run a command of pycoll with n ranks, whatever the current directory has of that name."""
    usual = {
        "timeout": None,
        "tag_output": False,
        "keep_going": False,
        "module": None,
        "text": None,
    }
    usual |= {"hosts": None, "rsh": "", "elastic": False, "restarts": None, "trace": None}
    usual |= {"bind": False}
    return main(argparse.Namespace(n=(n, n), script=[_RANK_PYCOLL, *words], **usual))


def _hosts(args: argparse.Namespace, n: int) -> list[str]:
    """Return the hosts of a job on several; none for one that stays here."""
    if args.hosts is None:
        return []
    hosts = args.hosts.split(",")
    if not all(hosts) or len(set(hosts)) < len(hosts):
        raise ArgumentError(f"--hosts is {args.hosts!r}, expected different names, as in a,b")
    if any(host.startswith("-") for host in hosts):
        raise ArgumentError(f"--hosts is {args.hosts!r}; a host has no name like an option")
    if n < len(hosts):
        raise ArgumentError(f"-n is {n}, expected at least a rank for each of {len(hosts)} hosts")
    if args.elastic or args.keep_going or args.bind:
        raise ArgumentError(
            "--elastic, --keep-going and --bind are for ranks of one host, not for --hosts"
        )
    return hosts


def _number_of_ranks(text: str) -> tuple[int, int]:
    """Read a number of ranks, ``4``, or the fewest and the most of them, ``2..8``."""
    least, dots, most = text.partition("..")
    return int(least), int(most if dots else least)


_number_of_ranks.__name__ = "number of ranks"  # in argparse's message about another text


def _written(sizes: tuple[int, int]) -> str:
    least, most = sizes
    return str(least) if least == most else f"{least}..{most}"


_INPUT = ("-", "/dev/stdin")  # of which one rank would read what another one needs


def _command(args: argparse.Namespace) -> list[str]:
    if args.module is not None:
        if not args.module:
            raise ArgumentError("-m needs the name of a module")
        return ["-m", *args.module]
    if args.text is not None:
        if not args.text:
            raise ArgumentError("-c needs the text of a program")
        return ["-c", *args.text]
    command = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not command:
        raise ArgumentError("no script given: pycoll run -n N script.py args...")
    if re.fullmatch(r"python[\d.]*", Path(command[0]).name) and shutil.which(command[0]):
        return _without_python(*command)
    if not Path(command[0]).is_file():
        way = "; for the text of a program there is -c" if command[0] in _INPUT else ""
        raise ArgumentError(f"{command[0]!r} is not a file{way}")
    return command


def _without_python(python: str, *words: str) -> list[str]:
    """Return the command of ``python script.py``, ``python -m module`` or ``python -c code``."""
    found = str(shutil.which(python))
    if not os.path.samefile(found, sys.executable):
        raise ArgumentError(
            f"{found} is not the Python of the ranks, {sys.executable}: leave {python!r} out"
        )
    if len(words) > 1 and words[0] in ("-c", "-m"):
        return list(words)
    if not words or not Path(words[0]).is_file():
        text = "a script, -m and a module, or -c and a program"
        raise ArgumentError(
            f"after {python!r}: expected {text}, got {' '.join(words) or 'nothing'}"
        )
    return list(words)
