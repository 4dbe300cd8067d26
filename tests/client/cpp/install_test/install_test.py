"""The installed client library as users see it: find_package(rapt), headers, a working example.

install_test.py BUILD CMAKE COMPILER COMPILE_FLAGS; all output is under BUILD/install_test."""

import pathlib
import re
import sys
from xml.etree import ElementTree

from installed import EXAMPLE_OUTPUT, InstalledComponent, run
from rapt_server import RaptServer

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parents[3] / "client" / "examples"
HEADERS = {"attend.h", "cache.h", "cache_transfer.h", "choices.h", "client.h", "data_type.h", "memory.h", "model.h",
           "patterns.h", "placement.h", "reports.h", "sharded_cache.h", "stream.h", "tensor.h"}  # fmt: skip
DECODED = [
    "prompt:    red green blue yellow black red green",
    "continues: blue yellow black red green blue yellow black",
    "the fork:  black red green blue yellow black red green",
]
PRIVATE = re.compile(r"/(grpc|grpcpp|google/protobuf)/")


def main(build, cmake, compiler, flags):
    root = pathlib.Path(build) / "install_test"
    component = InstalledComponent(build, cmake, "client", root)
    assert component.headers() == HEADERS, f"installed {component.headers()}, expected {HEADERS}"
    consumer, log = component.build_consumer(
        HERE, f"-DEXAMPLES={EXAMPLES}", f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_CXX_FLAGS={flags}"
    )
    included = re.findall(r"^\.+ (\S+)$", log, re.MULTILINE)
    assert any(path.endswith("/rapt/client.h") for path in included), log
    private = sorted({path for path in included if PRIVATE.search(path.removeprefix(str(root)))})
    assert not private, f"public headers include {private}"

    picture = root / "train_copy.svg"
    with RaptServer("--kv_cache_bytes=4194304") as server:
        output = run(consumer / "attend", server.grpc_address)
        training = run(consumer / "train_copy", server.grpc_address, picture)
        decoded = run(consumer / "decode", server.grpc_address)
    print(output, training, decoded)
    assert decoded.splitlines() == DECODED, decoded
    assert output.splitlines() == EXAMPLE_OUTPUT, output
    check_training(training, picture)


def check_training(output, picture):
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss ([0-9.]+)$", output, re.MULTILINE)]
    assert losses[-1] < 0.01 * losses[0], output
    cells = ElementTree.parse(picture).findall(".//{http://www.w3.org/2000/svg}rect[@stroke]")
    assert len(cells) == 2 * 2 * 12 * 12, f"{len(cells)} cells in {picture}"


if __name__ == "__main__":
    main(*sys.argv[1:])
