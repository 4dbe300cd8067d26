"""The installed librapt_attention.so as its users meet it: find_package(rapt) in C, the example runs.

install_test.py BUILD CMAKE COMPILER COMPILE_FLAGS; all it makes is under BUILD/attention_install_test."""

import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parents[3] / "attention" / "c" / "examples"


def run(*command):
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0, f"{' '.join(map(str, command))} ended with {ran.returncode}:\n{ran.stdout}"
    return ran.stdout


def main(build, cmake, compiler, flags):
    root = pathlib.Path(build) / "attention_install_test"
    shutil.rmtree(root, ignore_errors=True)
    prefix, consumer = root / "prefix", root / "build"
    run(cmake, "--install", build, "--prefix", prefix, "--component", "attention")
    headers = {path.name for path in (prefix / "include" / "rapt").iterdir()}
    assert headers == {"attention.h"}, f"installed {headers}"

    # Elsewhere: nothing that was installed may remember where.
    moved = root / "moved"
    prefix.rename(moved)
    run(cmake, "-G", "Ninja", "-S", HERE, "-B", consumer, f"-DCMAKE_PREFIX_PATH={moved}",
        f"-DEXAMPLES={EXAMPLES}", f"-DCMAKE_C_COMPILER={compiler}", f"-DCMAKE_C_FLAGS={flags}")  # fmt: skip
    run(cmake, "--build", consumer)
    output = run(consumer / "attention")
    print(output)
    assert output.splitlines() == [
        "token 0: weights 1.0000 0.0000 0.0000, y 1.0000 0.0000 1.0000 0.0000",
        "token 1: weights 0.2689 0.7311 0.0000, y 0.2689 0.7311 0.2689 0.7311",
        "token 2: weights 0.2741 0.2741 0.4519, y 0.7259 0.7259 0.2741 0.2741",
    ], output


if __name__ == "__main__":
    main(*sys.argv[1:])
