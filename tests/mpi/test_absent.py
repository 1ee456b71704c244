"""A rank that does not come to start-up is named; one that comes too late hears of it."""

import pytest

import mpirun

SAID = {"init": "not called pycoll.init", "card": "come to it, but not gone on"}


@pytest.mark.parametrize("step", ["init", "card"])
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_who_does_not_come_is_named_by_all_others(mpi, tmp_path, step, transport):
    words = [str(tmp_path), step]
    program = mpirun.PROGRAMS.with_name("absent.py")
    process = mpirun.launch(4, program, words, PYCOLL_TRANSPORT=transport)
    output = mpirun.finish(process, 45)
    found = mpirun.results(4, tmp_path)
    assert None not in found, output
    late = found.pop(1)
    for kind, text, seconds in found:
        assert kind == "CollTimeout"
        assert f"rank 1 has {SAID[step]}" in text, text
        assert seconds < 4, text
    assert late[0] == "CollTimeout"
    assert "more than 1.5 s after each other" in late[1]
