"""What a process started by ``pycoll run`` executes: the user's script, as Python itself would.

``python rank_main.py RANK LAUNCHER_PID REPORT_FD KEEP_GOING WHOLE PROGRAM args...``, where
PROGRAM is a script, ``-m module`` or ``-c text``.

It differs from ``python script args...`` in three ways: the process dies with its launcher; an
exception is written to the launcher's report, so that of all the tracebacks of a failing job only
the one that began it is shown; and where WHOLE is 1, because ranks share their output, each line
is written in one piece. This file imports nothing of pycoll, and is run by its path:
a script finds the same modules as without it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType

PR_SET_PDEATHSIG = 1
OF_TEXT = "<string>"  # what Python calls the file of a program that is a text
MOST_OF_A_LINE = 1 << 16  # bytes that wait for its end
_WITH_NAMES = AttributeError, TypeError, ImportError, ValueError
PACKAGE = os.path.abspath(os.path.join(__file__, *[os.pardir] * 3)) + os.sep


def main() -> None:
    """Run the user's program in place of this one."""
    rank, launcher_pid, report_fd, keep_going, whole = (int(text) for text in sys.argv[1:6])
    die_with(launcher_pid)
    os.set_inheritable(report_fd, False)
    install_hook(rank, report_fd, bool(keep_going))
    guard_output(bool(whole))
    code, module = load(sys.argv[6:])
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0):  # Python forgets it, but peers have to hear the reason
            sys.last_value = SystemExit(error.code)
        raise


def die_with(launcher_pid: int) -> None:
    """Ask the kernel to kill this process when its launcher dies, however it dies."""
    with contextlib.suppress(ImportError, AttributeError):  # an interpreter without ctypes
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


class WholeLines(io.TextIOWrapper):
    """Text of which each line is written in one piece, though `print` gives its end separately."""

    def write(self, text: str) -> int:
        """Write up to the last end of a line; the rest waits for `flush`, or for the next end."""
        end = text.rfind("\n") + 1
        if end:
            super().write(text[:end])
            self.flush()
        super().write(text[end:])
        return len(text)


class AtOnce(io.BufferedWriter):
    """What PYTHONUNBUFFERED asks for; but what a signal cuts short is written to its end."""

    def write(self, data: bytes) -> int:
        """Write all of it."""
        written = super().write(data)
        self.flush()
        return written


def guard_output(whole: bool) -> None:
    """Lose nothing of stdout and stderr; `whole`: write each line in one piece."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # closed
            encoding, errors, mode = stream.encoding, stream.errors, stream.mode
            buffer = stream.detach()
            buffer = AtOnce(buffer) if isinstance(buffer, io.RawIOBase) else buffer
            kind = WholeLines if whole else io.TextIOWrapper
            guarded = kind(buffer, encoding, errors, write_through=not whole)
            guarded.mode, guarded._CHUNK_SIZE = mode, MOST_OF_A_LINE
            setattr(sys, name, guarded)
            setattr(sys, f"__{name}__", guarded)


def load(command: list[str]) -> tuple[CodeType, ModuleType]:
    """Set ``sys.argv`` and ``sys.path`` and return the program with its ``__main__`` module."""
    is_module, is_text = command[0] == "-m", command[0] == "-c"
    sys.argv[:] = command[is_module:]
    if not getattr(sys.flags, "safe_path", False):
        script = os.path.dirname(os.path.realpath(sys.argv[0]))
        sys.path[0] = "" if is_text else os.getcwd() if is_module else script
    if is_text:
        text = sys.argv.pop(1)
        return compile(text, OF_TEXT, "exec", dont_inherit=True), ModuleType("__main__")
    return _load_module(sys.argv[0]) if is_module else _load_script(sys.argv[0])


def _load_script(path: str) -> tuple[CodeType, ModuleType]:
    path = os.path.abspath(path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    return code, _main_module(path, SourceFileLoader("__main__", path))


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(name + ".__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and spec.loader else None
    if code is None:
        raise ModuleNotFoundError(f"No module named {name}, or not one that can be run", name=name)
    sys.argv[0] = str(spec.origin)
    module = _main_module(sys.argv[0], spec.loader)
    module.__spec__, module.__package__, module.__cached__ = spec, spec.parent, spec.cached
    return code, module


def _main_module(path: str, loader: object) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__, module.__loader__, module.__cached__ = path, loader, None
    module.__builtins__ = sys.modules["builtins"]
    return module


def install_hook(rank: int, report_fd: int, keep_going: bool) -> None:
    """Show an uncaught exception in full only on the rank where the trouble began.

    Where the others go on after a failure, each may begin with another one.
    """
    this_file = __file__  # Python 3.14 forgets it before the hook is called

    def hook(kind: type, value: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(ValueError):  # not the main thread
            # Ctrl-C reaches all ranks: one that hears of it from a peer first is ending already.
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        while trace is not None and trace.tb_frame.f_code.co_filename == this_file:
            trace = trace.tb_next
        value = value.with_traceback(trace)
        if "pycoll.comm" in sys.modules and isinstance(value, _WITH_NAMES):
            importlib.import_module("pycoll.comm.other_names").explain(value)
        consequence = is_consequence(value)
        first = first_cause(report_fd, rank, value, consequence) or keep_going
        if first and not consequence:
            show_at_once(kind, value, trace)
        else:
            sys.stderr.write(f"rank {rank}: {one_line(value)}\n")
        if kind is KeyboardInterrupt:
            remember_interrupt()

    sys.excepthook = hook


class Page(io.StringIO):
    """Text that will go to a stream; a traceback has colours here if it would have them there."""

    def __init__(self, stream: io.TextIOBase) -> None:
        super().__init__()
        self.isatty: Callable[[], bool] = stream.isatty  # type: ignore[method-assign]


def show_at_once(kind: type, value: BaseException, trace: TracebackType | None) -> None:
    """Show an exception as Python does, in one piece, so that no line of another rank is in it."""
    stream = sys.stderr
    if not isinstance(stream, io.TextIOBase):  # closed, or of the script's own
        return sys.__excepthook__(kind, value, trace)
    sys.stderr = page = Page(stream)
    try:
        sys.__excepthook__(kind, value, trace)
    finally:
        sys.stderr = stream
        stream.write(page.getvalue())


def remember_interrupt() -> None:
    """Let Python end by SIGINT, as it does after an uncaught KeyboardInterrupt.

    It forgets that there was one when code is run from text; to show a traceback may import modules
    that do so (Python 3.13).
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def is_consequence(value: BaseException | None) -> bool:
    """Return whether an exception, or one that led to it, tells of the failure of a peer."""
    errors = sys.modules.get("pycoll.errors")
    while errors is not None and value is not None:
        if isinstance(value, (errors.PeerLost, errors.Revoked, errors.PeerRejected)):
            return True
        value = value.__cause__ or value.__context__
    return False


def first_cause(report_fd: int, rank: int, value: BaseException, consequence: bool) -> bool:
    """Append to the job's report; return whether no other rank has reported a cause before."""
    record = {
        "rank": rank,
        "consequence": consequence,
        "traceback": "".join(traceback.format_exception(value)),
    }
    try:
        if not os.readlink(f"/proc/self/fd/{report_fd}").startswith("/memfd:pycoll-report"):
            return True  # the script has closed the report and opened something else
        os.write(report_fd, json.dumps(record).encode() + b"\n")  # O_APPEND: ranks take turns
        lines = os.pread(report_fd, os.fstat(report_fd).st_size, 0).splitlines()
        causes = [r["rank"] for r in map(json.loads, lines) if not r["consequence"]]
    except (OSError, ValueError):
        return True
    return causes[:1] in ([], [rank])


def one_line(value: BaseException) -> str:
    """Return type, message and place of an exception, in one line: the place in the program."""
    try:
        text = ": ".join([type(value).__name__, *str(value).splitlines()[:1]])
    except Exception:  # a class of the user's, whose __str__ fails
        text = type(value).__name__
    import sysconfig  # takes its time, and few programs fail

    others = (PACKAGE, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    frames = [
        (frame.f_code.co_filename, line, frame.f_globals.get("__name__"))
        for frame, line in traceback.walk_tb(value.__traceback__)
    ]
    for hidden in (others, PACKAGE):  # the program may be installed itself
        own = [
            (file, line, name)
            for file, line, name in frames
            if (file[:1] == "/" and not file.startswith(hidden))
            or (file == OF_TEXT and name == "__main__")
        ]
        if own:
            break
    frames = own or frames
    return f"{text} ({frames[-1][0]}:{frames[-1][1]})" if frames else text


if __name__ == "__main__":
    main()
