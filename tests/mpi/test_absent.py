"""A rank that does not come to start-up is named; one that comes too late hears of it."""

import mpirun


def test_who_does_not_come_is_named_by_all_others(mpi, tmp_path):
    process = mpirun.launch(4, mpirun.PROGRAMS.with_name("absent.py"), [str(tmp_path)])
    output = mpirun.finish(process, 45)
    found = mpirun.results(4, tmp_path)
    assert None not in found, output
    late = found.pop(1)
    for kind, text, seconds in found:
        assert kind == "CollTimeout"
        assert "rank 1 has not called pycoll.init" in text, text
        assert seconds < 4, text
    assert late[0] == "CollTimeout"
    assert "more than 1.5 s after each other" in late[1]
