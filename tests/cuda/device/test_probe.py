"""What is missing for arrays on devices, for people."""

import sys

from pycoll.cli import main
from pycoll.cuda import missing
from pycoll.cuda.probe import parts

NAMES = ["CUDA kernels", "CUDA device", "CuPy", "NCCL"]


def test_every_part_is_looked_at():
    found = list(parts())
    assert [part.name for part in found] == NAMES
    assert all(part.found for part in found)
    assert missing() == [f"{p.name}: {p.found} {p.fix}" for p in found if p.fix]


def test_what_cannot_be_imported_is_named_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    said = {part.name: part for part in parts()}
    for name, fix in (("CuPy", "cupy-cuda13x"), ("NCCL", "'nccl4py[cu13]'")):
        assert "cannot be imported" in said[name].found
        assert said[name].fix == f"pip install {fix}"


def test_the_doctor_reports_it(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES)
