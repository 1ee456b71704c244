"""What ranks give to `save` and `load` has to be the same."""

import os

import pytest

from parallel.models import CrossEntropy, mlp
from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel import DataParallel, Mesh, load, save
from pycoll.testing import run_threads


@pytest.mark.parametrize(
    ("kind", "text", "other"),
    [
        (MismatchError, r"rank 0: path='.*/a'; rank 1: path='.*/b'", {"path": "b"}),
        (MismatchError, "rank 0: keep=2; rank 1: keep=None", {"keep": None}),
        (MismatchError, "background=False; rank 1: background=True", {"background": True}),
        (ArgumentError, "rank 1 has keep=0; accepted are integers", {"keep": 0}),
        (ArgumentError, "rank 1 has a NoneType and a DataParallel; expected", {"path": None}),
    ],
)
def test_arguments_that_differ(tmp_path, kind, text, other):
    def rank(comm):
        given = {"path": "a", "keep": 2, **(other if comm.rank else {})}
        path = given.pop("path")
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1)) as engine:
            with pytest.raises(kind, match=text):
                save(path and tmp_path / path, engine, **given)
            if "path" in other:
                with pytest.raises(kind, match=r"path|NoneType"):
                    load(path and tmp_path / path, engine, if_any=True)
            save(tmp_path / "a", engine)  # goes on

    run_threads(2, rank)
    assert os.listdir(tmp_path) == ["a"]
