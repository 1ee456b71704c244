"""What is missing for arrays on devices, for people."""

import sys

from pycoll.cli import main
from pycoll.cuda import missing, probe
from pycoll.cuda.device.library import FABRIC, VMM
from pycoll.cuda.probe import parts

NAMES = ["CUDA kernels", "CUDA device", "peer memory", "CuPy", "NCCL"]


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


def test_how_ranks_would_map_heaps(host_kernels, monkeypatch):
    def said():
        return {part.name: part.found for part in parts()}["peer memory"]

    monkeypatch.setattr(probe, "library", lambda: host_kernels)
    owned = len(host_kernels.owned)
    assert said() == "virtual memory by descriptors (fabric handles: no, multicast: no)"
    host_kernels.vmm(VMM | FABRIC)
    assert "fabric handles: yes" in said()
    host_kernels.vmm(VMM, descriptors=False)
    assert said() == "CUDA IPC, as virtual memory is refused: importing memory of a peer: refused"
    host_kernels.vmm(0)
    assert said() == "CUDA IPC, as there is no virtual memory that can be shared"
    monkeypatch.setenv("PYCOLL_DEVICE_MEMORY", "ipc")
    assert said() == "CUDA IPC, as PYCOLL_DEVICE_MEMORY says"
    assert len(host_kernels.owned) == owned


def test_the_doctor_reports_it(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES)
