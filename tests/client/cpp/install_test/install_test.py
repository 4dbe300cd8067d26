"""The installed client library as its users meet it: find_package(rapt), headers, an example that runs.

install_test.py BUILD CMAKE COMPILER COMPILE_FLAGS; all it makes is under BUILD/install_test."""

import pathlib
import re
import shutil
import subprocess
import sys

from rapt_server import RaptServer

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parents[3] / "client" / "examples"
HEADERS = {"attend.h", "client.h", "reports.h", "stream.h", "tensor.h"}
PRIVATE = re.compile(r"/(grpc|grpcpp|google/protobuf)/")


def run(*command):
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0, f"{' '.join(map(str, command))} ended with {ran.returncode}:\n{ran.stdout}"
    return ran.stdout


def main(build, cmake, compiler, flags):
    root = pathlib.Path(build) / "install_test"
    shutil.rmtree(root, ignore_errors=True)
    prefix, consumer = root / "prefix", root / "build"
    run(cmake, "--install", build, "--prefix", prefix, "--component", "client")
    installed = {path.name for path in (prefix / "include" / "rapt").iterdir()}
    assert installed == HEADERS, f"installed {installed}, expected {HEADERS}"

    # Elsewhere: nothing that was installed may remember where.
    moved = root / "moved"
    prefix.rename(moved)
    run(cmake, "-G", "Ninja", "-S", HERE, "-B", consumer, f"-DCMAKE_PREFIX_PATH={moved}",
        f"-DEXAMPLES={EXAMPLES}", f"-DCMAKE_CXX_COMPILER={compiler}",
        f"-DCMAKE_CXX_FLAGS={flags}")  # fmt: skip
    log = run(cmake, "--build", consumer, "--verbose")
    included = re.findall(r"^\.+ (\S+)$", log, re.MULTILINE)
    assert any(path.endswith("/rapt/client.h") for path in included), log
    private = sorted({path for path in included if PRIVATE.search(path.removeprefix(str(root)))})
    assert not private, f"public headers include {private}"

    with RaptServer() as server:
        output = run(consumer / "attend", server.grpc_address)
    print(output)
    assert output.splitlines() == [
        "token 0: weights 1.0000 0.0000 0.0000, y 1.0000 0.0000 1.0000 0.0000",
        "token 1: weights 0.2689 0.7311 0.0000, y 0.2689 0.7311 0.2689 0.7311",
        "token 2: weights 0.2741 0.2741 0.4519, y 0.7259 0.7259 0.2741 0.2741",
    ], output


if __name__ == "__main__":
    main(*sys.argv[1:])
