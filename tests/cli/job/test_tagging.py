"""Output with the number of the rank before each line."""

import io
import os
import signal
import subprocess
import time

import pytest

from cli.conftest import ROOT, RUN
from pycoll.cli.job.tagging import TaggedStream


def test_tagged_lines_are_whole(jobs):
    path = jobs.script(
        """
        for i in range(50):
            for part in ("a" * 500, "b" * 500, "\\n"):
                sys.stdout.write(part)
                sys.stdout.flush()
        print("to stderr", file=sys.stderr)
        print("no end", end="")
        """
    )
    done = jobs.run("-n", 4, "--tag-output", path)
    assert done.returncode == 0
    lines = sorted(done.stdout.splitlines())
    whole = "a" * 500 + "b" * 500
    assert lines == sorted(f"[{r}] {x}" for r in range(4) for x in [whole] * 50 + ["no end"])
    assert sorted(done.stderr.splitlines()) == [f"[{r}] to stderr" for r in range(4)]


@pytest.mark.parametrize("no_color", ["", "1"])
def test_numbers_have_colours_on_a_terminal(no_color, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    reading, writing = os.pipe()
    leader, terminal = os.openpty()
    with os.fdopen(terminal, "wb") as sink, os.fdopen(writing, "wb") as rank:
        stream = TaggedStream(1, os.fdopen(reading, "rb"), sink)
        rank.write(b"text\n")
        rank.flush()
        stream.pump()
        shown = os.read(leader, 100)
    stream.close()
    os.close(leader)
    assert shown == (b"[1] text\r\n" if no_color else b"\x1b[32m[1] \x1b[0mtext\r\n")


def test_tagged_output_is_live(jobs):
    with jobs.started(
        jobs.script("print('now'); mark('up'); time.sleep(1000)"), 1, "--tag-output"
    ) as (
        job,
        _,
    ):
        assert job.stdout.readline() == "[0] now\n"
        job.send_signal(signal.SIGTERM)
        assert job.wait(jobs.deadline_s) == 128 + signal.SIGTERM


def test_a_reader_that_leaves_ends_the_job(jobs):
    path = jobs.script("mark('up')\nwhile True: print('y' * 100)")
    with jobs.started(path, 2, "--tag-output") as (job, pids):
        job.stdout.close()
        assert job.wait(jobs.deadline_s) == 128 + signal.SIGPIPE
        assert jobs.all_gone(pids)


def tagged(*texts):
    """Return what becomes of texts that are read one after the other."""
    reading, writing = os.pipe()
    sink = io.BytesIO()
    stream = TaggedStream(7, os.fdopen(reading, "rb"), sink)
    for text in texts:
        os.write(writing, text)
        assert stream.pump()
    os.close(writing)
    stream.close()
    return sink.getvalue()


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        ([b"10%\r20%\r30%\n"], [b"10%", b"20%", b"30%"]),
        ([b"\r10%", b"\r20%", b"\r    \r", b"done\n"], [b"10%", b"20%", b"done"]),
        ([b"a\r\nb\r", b"\nc\n"], [b"a", b"b", b"c"]),
        ([b"\n\n  \nx"], [b"", b"", b"  ", b"x"]),
        ([], []),
    ],
)
def test_carriage_returns_end_lines(texts, lines):
    assert tagged(*texts) == b"".join(b"[7] " + line + b"\n" for line in lines)


@pytest.mark.parametrize("text", ["Name: ", "10%\\r20%\\r"])
def test_an_unfinished_line_is_passed_on(jobs, text):
    path = jobs.script(
        f"""
        print("{text}", end="", flush=True)
        mark("up")
        time.sleep(1000)
        """
    )
    with jobs.started(path, 1, "--tag-output") as (job, _):
        first = job.stdout.readline()
        assert first == ("[0] Name: \n" if text == "Name: " else "[0] 10%\n")
        job.send_signal(signal.SIGTERM)
        job.wait(jobs.deadline_s)


def test_a_line_that_never_ends_is_passed_on_in_large_pieces():
    reading, writing = os.pipe()
    sink = io.BytesIO()
    stream = TaggedStream(0, os.fdopen(reading, "rb"), sink)
    piece = b"x" * 4096
    for _ in range(1000):
        os.write(writing, piece)
        stream.pump()
    assert sink.tell() > 0  # it does not wait for an end that may never come
    os.close(writing)
    stream.close()
    assert sink.getvalue().replace(b"[0] ", b"").replace(b"\n", b"") == piece * 1000
    assert sink.getvalue().count(b"\n") <= 64


def test_a_write_that_is_cut_short_is_continued():
    class Short(io.BytesIO):
        def write(self, data):
            return super().write(bytes(data[:7]))

    reading, writing = os.pipe()
    sink = Short()
    stream = TaggedStream(3, os.fdopen(reading, "rb"), sink)
    os.write(writing, b"a line of more than seven\n")
    os.close(writing)
    stream.close()
    assert sink.getvalue() == b"[3] a line of more than seven\n"


@pytest.mark.parametrize("tag", ["", "[0] "])
def test_signals_cut_no_line(jobs, tag):
    """A signal interrupts a write to a full pipe; with PYTHONUNBUFFERED nobody continues it."""
    path = jobs.script(
        """
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        for part in range(8):
            print(f"{part}" * 50000)
        signal.setitimer(signal.ITIMER_REAL, 0)
        """
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [*RUN, "-n", "1", *["--tag-output"] * bool(tag), str(path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as job:
        found = b""
        while data := os.read(job.stdout.fileno(), 4096):
            found += data
            time.sleep(0.005)
    assert found.decode().splitlines() == [tag + str(part) * 50000 for part in range(8)]
