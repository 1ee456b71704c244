"""The device library: what Python declares is what the header says, and errors are pycoll's."""

import ctypes
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pycoll.config import VERSION
from pycoll.cuda.device import library as real
from pycoll.errors import ArgumentError, CudaUnavailable, ScheduleError, TransportError

ROOT = Path(__file__).resolve().parents[3]
HEADERS = sorted((ROOT / "csrc/cuda/host").glob("pycoll_cuda*.h"))
STRUCTS = {
    "PycollCudaDevice": real.DeviceInfo,
    "PycollCudaIpc": real.Ipc,
    "PycollCudaMapping": real.Mapping,
    "PycollCudaShare": real.Share,
    "PycollCudaMulticast": real.Multicast,
    "PycollCudaError": real.KernelError,
    "PycollCudaCallSpec": real.Spec,
    "PycollCudaStep": real.Step,
    "PycollCudaCallInfo": real.CallInfo,
    "PycollCudaNorm": real.Norm,
    "PycollCudaMessage": real.Message,
}


def test_structures_are_those_of_the_header(tmp_path):
    """Asked of a C compiler: sizes, and the place and size of every field."""
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu 0\\n", sizeof({name}));')
        for field, _ in struct._fields_:
            size = f"sizeof((({name}*)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", {size}, offsetof({name}, {field}));')
    source = tmp_path / "ask.cpp"
    body = "\n".join(lines)
    headers = "".join(f'#include "{path}"\n' for path in HEADERS)
    source.write_text(f"#include <cstdio>\n{headers}int main() {{\n{body}\n}}\n")
    compiler = ["g++", f"-I{ROOT / 'csrc'}", "-o", tmp_path / "ask", source]
    subprocess.run(compiler, check=True, timeout=60)
    said = subprocess.run([tmp_path / "ask"], capture_output=True, text=True, check=True).stdout
    expected = []
    for name, struct in STRUCTS.items():
        expected.append(f"{name} {ctypes.sizeof(struct)} 0")
        for field, _ in struct._fields_:
            place = getattr(struct, field)
            expected.append(f"{name}.{field} {place.size} {place.offset}")
    assert said.splitlines() == expected


def test_functions_are_those_of_the_header():
    text = "".join(path.read_text(encoding="utf-8") for path in HEADERS)
    text = re.sub(r"//[^\n]*", "", text)
    found = dict(re.findall(r"PYCOLL_CUDA_API int pycoll_cuda_(\w+)\(([^)]*)\)", text))
    for name, arguments in real.FUNCTIONS.items():
        assert len(arguments) == len(found[name].split(",")), name
        for declared, given in zip(found[name].split(","), arguments, strict=True):
            is_pointer = "*" in declared
            size = (
                8
                if is_pointer
                else {"int": 4, "uint32_t": 4, "size_t": 8, "uint64_t": 8, "double": 8}[
                    declared.split()[0]
                ]
            )
            assert ctypes.sizeof(given) == size, (name, declared)
    defined = dict(re.findall(r"#define PYCOLL_CUDA_(\w+) (\d+)", text))
    assert int(defined["ABI"]) == real.ABI
    assert int(defined["MAX_RANKS"]) == real.MAX_RANKS


def build(folder, body, abi=real.ABI):
    """Compile a library that has all functions; those of ``body`` do something."""
    names = [n for n in real.FUNCTIONS if f"pycoll_cuda_{n}(" not in body]
    empty = "\n".join(f"int pycoll_cuda_{name}() {{ return 0; }}" for name in names)
    text = f"""
int pycoll_cuda_abi(void) {{ return {abi}; }}
int pycoll_cuda_supports(int dtype, int op) {{ return 1; }}
int pycoll_cuda_in_packets(int dtype, int op, int world_size, unsigned long nbytes) {{ return 0; }}
unsigned long pycoll_cuda_message_parts(int n, unsigned long nbytes, int slotted) {{ return 1; }}
const char* pycoll_cuda_last_error(void) {{ return "the text"; }}
{body}
{empty}
"""
    source, path = folder / "library.c", folder / "library.so"
    source.write_text(text)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True, timeout=60)
    return path


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (1, CudaUnavailable),
        (2, ArgumentError),
        (3, ScheduleError),
        (4, ArgumentError),
        (5, TransportError),
    ],
)
def test_a_status_becomes_an_error(tmp_path, status, error):
    path = build(tmp_path, f"int pycoll_cuda_preload(int device) {{ return {status}; }}")
    with pytest.raises(error, match="the text"):
        real.Library(path).call("preload", 0)


def test_values_come_back(tmp_path):
    body = """
int pycoll_cuda_malloc(int device, unsigned long nbytes, void** pointer) {
  *pointer = (void*)(nbytes * 2 + device); return 0; }
int pycoll_cuda_device_count(int* count) { *count = 0; return 0; }
int pycoll_cuda_versions(int* driver, int* runtime) { *driver = 0; *runtime = 13000; return 0; }
"""
    made = real.Library(build(tmp_path, body))
    assert made.pointer("malloc", 1, 1 << 40) == (2 << 40) + 1
    assert made.versions() == (0, 13000)
    with pytest.raises(CudaUnavailable, match="no CUDA device"):
        made.device_count()


def test_a_library_that_cannot_be_used(tmp_path):
    with pytest.raises(CudaUnavailable, match=r"missing\).\n.*nvcc"):
        real.Library(tmp_path / "nothing.so")
    (tmp_path / "bad.so").write_text("no library")
    with pytest.raises(CudaUnavailable, match="build pycoll again"):
        real.Library(tmp_path / "bad.so")
    with pytest.raises(CudaUnavailable, match=f"version 9, expected {real.ABI}"):
        real.Library(build(tmp_path, "", abi=9))


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """Return the folder ``.dist-info`` that the package of the library gets, made by its build."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("package")
    make = "from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel(r'%s')"
    built = shutil.ignore_patterns("build", "*.egg-info")
    tree = shutil.copytree(ROOT / "packages/cuda13", folder / "packages/cuda13", ignore=built)
    (folder / "pycoll").mkdir()
    shutil.copy(ROOT / "pycoll/config.py", folder / "pycoll")
    command = [sys.executable, "-c", make % folder]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.dist-info"))


def test_the_library_of_the_package_is_found(tmp_path, monkeypatch, metadata):
    beside, site = tmp_path / "pycoll", tmp_path / "site"
    shutil.copytree(metadata, site / metadata.name)
    assert real.find(beside) == beside / real.NAME
    monkeypatch.syspath_prepend(site)
    packaged = real.find(beside)
    assert packaged == site / "pycoll_cuda13/libpycoll_cuda.so"
    versions = "int pycoll_cuda_versions(int* driver, int* made) { *driver = *made = 1; return 0; }"
    packaged.parent.mkdir()
    shutil.copy(build(tmp_path, versions), packaged)
    assert real.Library(packaged).versions() == (1, 1)
    beside.mkdir()
    (beside / real.NAME).touch()
    assert real.find(beside) == beside / real.NAME


def test_the_package_is_of_the_same_version(tmp_path, monkeypatch, metadata):
    shutil.copytree(metadata, tmp_path / metadata.name)
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.metadata.distribution(real.PACKAGE)
    assert found.version == VERSION
    assert found.requires == [f"pycollectives=={VERSION}"]
    text = tmp_path / metadata.name / "METADATA"
    text.write_text(text.read_text().replace(f"Version: {VERSION}", "Version: 0.0.9"))
    fix = (
        rf"{real.PACKAGE} 0.0.9 does not fit pycoll {VERSION}.\n.*wheel of {real.PACKAGE} {VERSION}"
    )
    with pytest.raises(CudaUnavailable, match=fix):
        real.find(tmp_path)
