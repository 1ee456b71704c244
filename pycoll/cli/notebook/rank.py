"""What each rank of a notebook runs: cells, one after the other, in one namespace."""

from __future__ import annotations

import _thread
import ast
import io
import json
import linecache
import os
import queue
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import pycoll
from pycoll.cli.job.rank_main import is_consequence, one_line
from pycoll.comm.other_names import explain
from pycoll.runtime.calls.parts.encoding import pack

GRACE_S = 5.0  # for a cell to end when the notebook is gone


class Lines(io.TextIOBase):
    """A stream whose lines go to the notebook."""

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, send: Any) -> None:
        self.send = send
        self.rest: str = ""

    def writable(self) -> bool:
        """It is for writing."""
        return True

    def write(self, text: str) -> int:
        """Send the lines that end in `text`; what follows waits for its end."""
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.send({"out": line})
        return len(text)

    def finish(self) -> None:
        """Send what has no end of a line."""
        if self.rest:
            self.write("\n")


class Rank:
    """A rank: its connection with the notebook, its communicators, its variables."""

    def __init__(self, path: str) -> None:
        """Join the job, and tell the notebook."""
        here = socket.socket(socket.AF_UNIX)
        here.connect(path)
        self.notebook: Connection = Connection(here.detach())
        self.job: pycoll.Communicator = pycoll.init()
        # What a failed cell breaks; the job's stays for the next one.
        self.comm: pycoll.Communicator = self.job.dup()
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.main: ModuleType = ModuleType("__main__")
        sys.modules["__main__"] = self.main
        self.main.__dict__.update(pycoll=pycoll, __builtins__=__builtins__)
        self.tell({"rank": self.job.rank, "pid": os.getpid()})

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self.notebook.send_bytes(json.dumps(message).encode())

    def listen(self) -> None:
        """Take messages, in a thread of its own; None when the notebook is gone."""
        try:
            while True:
                self.orders.put(json.loads(self.notebook.recv_bytes()))
        except (OSError, EOFError):
            self.orders.put(None)
            threading.Timer(GRACE_S, os._exit, [0]).start()
            _thread.interrupt_main()

    def serve(self) -> None:
        """Do what the notebook says until it is gone."""
        threading.Thread(target=self.listen, daemon=True).start()
        while True:
            try:
                order = self.orders.get()
            except KeyboardInterrupt:  # between cells
                continue
            if order is None:
                os._exit(0)  # at once: variables of the user's may take long to die
            if "run" in order:
                self.run(order["run"], order["name"])
            elif "renew" in order:
                self.renew()
            else:
                self.get(order["get"])

    def run(self, text: str, name: str) -> None:
        """Run a cell, and tell how it ended."""
        self.main.comm = self.comm  # type: ignore[attr-defined]
        lines = Lines(self.tell)
        before = sys.stdout, sys.stderr
        done: dict[str, Any] = {}
        try:
            sys.stdout = sys.stderr = lines  # type: ignore[assignment]
            value = self.evaluate(text, name)
            done["value"] = None if value is None else repr(value)
        except BaseException as error:
            explain(error)
            # Peers may wait for this rank in a call: they hear why it does not come.
            text = str(error) if isinstance(error, SyntaxError) else one_line(error)
            self.comm.abort(text)
            done["error"] = text
            done["consequence"] = is_consequence(error)
            shown = error.with_traceback(_from_cell(error, name))
            done["traceback"] = "".join(traceback.format_exception(shown))
        finally:
            lines.finish()
            sys.stdout, sys.stderr = before
        self.tell({"done": done})

    def evaluate(self, text: str, name: str) -> Any:
        """Execute the cell; return the value of its last line, if that is an expression."""
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        tree = ast.parse(text, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self.main.__dict__)
        if last is None:
            return None
        return eval(compile(ast.Expression(last.value), name, "eval"), self.main.__dict__)

    def renew(self) -> None:
        """Make another communicator of all ranks in place of one that has failed."""
        why = None
        try:
            self.comm.close()
            self.comm = self.job.dup()
        except Exception as error:
            why = one_line(error)
        self.tell({"renewed": why})

    def get(self, name: str) -> None:
        """Send a variable."""
        try:
            if name not in self.main.__dict__:
                raise NameError(f"there is no variable {name!r}")
            data = pack(self.main.__dict__[name], False)
        except Exception as error:
            return self.tell({"got": str(error)})
        self.tell({"got": None})
        self.notebook.send_bytes(data)


def _from_cell(error: BaseException, name: str) -> Any:
    """Return the part of a traceback that begins in the cell; None if it did not begin."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    Rank(sys.argv[1]).serve()
