"""What `make wheels` does beside building: it finds Pythons, and lets no bad wheel through."""

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("wheels", ROOT / "packages/wheels.py")
wheels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(wheels)


def wheel(folder, libraries, tag="manylinux_2_35_x86_64"):
    path = folder / f"pycollectives-1.0.0-cp311-cp311-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in libraries.items():
            archive.writestr(name, content)
    return path


def test_a_good_wheel_tells_its_abi(tmp_path, capsys):
    wheels.check(wheel(tmp_path, {"pycoll/_C.so": b"\0__pybind11_internals_v12_gxx_abi__\0"}))
    assert "0.00 MB, pycoll/_C.so pybind11_internals_v12_gxx_abi" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("libraries", "tag", "reason"),
    [
        ({"pycoll/_C.so": bytes(6_000_000)}, "manylinux_2_35_x86_64", "6000.* fewer than 6000000"),
        ({"pycoll/_C.so": b""}, "linux_x86_64", "manylinux expected"),
        ({}, "manylinux_2_35_x86_64", "one library"),
        (
            {"_C.so": b"", "x.libs/libm.so.6": b""},
            "manylinux_2_35_x86_64",
            "_C.so, x.libs/libm.so.6",
        ),
        ({"_C.so": b"", "libpycoll_cuda.so": b""}, "manylinux_2_35_x86_64", "one library"),
    ],
)
def test_a_bad_wheel_is_refused(tmp_path, libraries, tag, reason):
    with pytest.raises(SystemExit, match=reason):
        wheels.check(wheel(tmp_path, libraries, tag))


def test_a_python_is_found_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert wheels.find_python("3.11") is None
    here = "{}.{}".format(*sys.version_info)
    name = f"python{here}"
    (tmp_path / name).symlink_to(sys._base_executable)
    assert wheels.find_python(here) == str(tmp_path / name)
    (tmp_path / "python3.9").symlink_to(sys._base_executable)
    assert wheels.find_python("3.9") is None, "it is of another version"
