"""The wheel from a user's perspective: what it contains, and four lines and clients in a fresh environment of every Python
that it supports and the machine has. Run by `./dev package python`.

wheel_test.py WHEEL WORK_DIRECTORY"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

MOST_BYTES = 2_000_000  # PyPI counts decimal megabytes
PYTHONS = [f"python3.{minor}" for minor in range(11, 20)]
FOUR_LINES = """
import numpy as np
import rapt
x = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]], np.float32)[None, None]
print(rapt.attention(x, x, x)[0, 0].round(4).tolist())
"""
WITHOUT_LIBRARY = """
import pathlib, rapt
pathlib.Path(rapt.__file__).with_name("librapt_attention.so").unlink()
"""
CLIENTS = "import rapt; rapt.Client('http://127.0.0.1:1').close(); rapt.AsyncClient('http://127.0.0.1:1').close()"
WANT = [[0.8137, 0.4935, 0.5065, 0.1863], [0.4935, 0.8137, 0.1863, 0.5065], [0.7259, 0.7259, 0.2741, 0.2741]]
ROOT = pathlib.Path(__file__).resolve().parents[3]


def check_contents(wheel):
    version = re.search(r"project\(rapt VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    assert re.fullmatch(rf"rapt_attention-{version}-py3-none-manylinux_2_34_x86_64(\..*)?\.whl", wheel.name), wheel.name
    assert wheel.stat().st_size <= MOST_BYTES, f"{wheel.name} has {wheel.stat().st_size} bytes"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"rapt_attention-{version}.dist-info/METADATA").decode()
    package = ROOT / "client/python"
    sources = {str(file.relative_to(package)) for file in (package / "rapt").rglob("*.py")}
    missing = sources | {"rapt/py.typed", "rapt/librapt_attention.so"}
    missing |= {f"rapt_attention-{version}.dist-info/licenses/{name}" for name in ("LICENSE", "THIRD_PARTY_NOTICES")}
    assert missing <= names, f"missing: {missing - names}"
    assert not [name for name in names if not name.startswith(("rapt/", "rapt_attention-"))], names
    assert "Requires-Dist: numpy" in metadata and "Requires-Dist: grpcio" in metadata and "License-Expression: Apache-2.0" in metadata, metadata


def find(python):
    """The program, also of pyenv, whose shims do not run versions that are not chosen; or None."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    for program in (shutil.which(python), *sorted(pyenv.glob(f"versions/*/bin/{python}"))):
        if program and subprocess.run([program, "--version"], capture_output=True).returncode == 0:
            return program
    return None


def check_in_fresh_environment(python, wheel, work):
    shutil.rmtree(work, ignore_errors=True)
    subprocess.run([python, "-m", "venv", work], check=True)
    subprocess.run([work / "bin/pip", "install", "--quiet", wheel], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAPT_", "PYTHON"))}
    fresh = {"check": True, "env": environment, "cwd": "/"}
    output = subprocess.run([work / "bin/python", "-c", FOUR_LINES], capture_output=True, text=True, **fresh).stdout
    got = [[round(x, 4) for x in row] for row in eval(output)]
    assert got == WANT, got
    for code in (CLIENTS, WITHOUT_LIBRARY, CLIENTS):
        subprocess.run([work / "bin/python", "-c", code], **fresh)


def main(wheel, work):
    wheel, work = pathlib.Path(wheel), pathlib.Path(work).resolve()
    check_contents(wheel)
    pythons = {python: program for python in PYTHONS if (program := find(python))}
    assert pythons, f"none of {', '.join(PYTHONS)} is installed"
    for python, program in pythons.items():
        check_in_fresh_environment(program, wheel, work / python)
    print(f"package: {wheel.name}, {wheel.stat().st_size} bytes, computes in {', '.join(pythons)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
