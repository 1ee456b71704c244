"""Output with the number of the rank before each line."""

import signal


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
