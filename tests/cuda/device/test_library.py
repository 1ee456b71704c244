"""The device library as it is built: it loads anywhere, and says what is missing."""

import subprocess
from ctypes import byref, c_int, c_size_t, c_void_p

import pytest

import build_cuda
from device_library import OK, ROOT, UNAVAILABLE, DeviceError, Library

PATH = ROOT / "pycoll" / build_cuda.LIBRARY
needs_library = pytest.mark.skipif(not PATH.exists(), reason="pycoll was built without nvcc")


@needs_library
def test_it_depends_on_no_driver_and_exports_its_interface_alone():
    needed = subprocess.run(["ldd", str(PATH)], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in needed.replace(str(ROOT), "")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(PATH)], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    headers = (ROOT / "csrc/cuda/host").glob("pycoll_cuda*.h")
    declared = "".join(header.read_text(encoding="utf-8") for header in headers)
    functions = {name for name in names if name.startswith("pycoll_cuda_")}
    assert len(functions) > 30
    assert all(f"{name}(" in declared for name in functions)
    assert declared.count("PYCOLL_CUDA_API") - 1 == len(functions)


@needs_library
def test_without_a_device_it_says_so():
    library = Library(PATH)
    assert library.dll.pycoll_cuda_abi() == 1
    count = c_int()
    if library.dll.pycoll_cuda_device_count(byref(count)) == OK:
        assert count.value > 0
    else:
        calls = [
            ("device_count", (byref(count),)),
            ("group_virtual", (0, 4, 8, byref(c_void_p()))),
            ("malloc", (0, c_size_t(1 << 20), byref(c_void_p()))),
        ]
        for name, arguments in calls:
            with pytest.raises(DeviceError, match=r"driver|device") as caught:
                getattr(library, name)(*arguments)
            assert caught.value.status == UNAVAILABLE
    driver, runtime = c_int(-1), c_int(-1)
    assert library.dll.pycoll_cuda_versions(byref(driver), byref(runtime)) == OK
    assert runtime.value >= 12080
    assert driver.value >= 0


def test_without_a_compiler_the_rest_is_built(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.delenv("PYCOLL_CUDA", raising=False)
    monkeypatch.setattr(build_cuda, "has_device", lambda: False)
    build_cuda.build(str(tmp_path))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(build_cuda, "has_device", lambda: True)
    build_cuda.build(str(tmp_path))
    assert "without its device library: there is no nvcc" in capsys.readouterr().err
    monkeypatch.setenv("PYCOLL_CUDA", "0")
    build_cuda.build(str(tmp_path))
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("PYCOLL_CUDA", "1")
    with pytest.raises(RuntimeError, match="no nvcc"):
        build_cuda.build(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
