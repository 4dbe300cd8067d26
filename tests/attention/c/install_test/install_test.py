"""The installed librapt_attention.so from a user's perspective: find_package(rapt) in C, and the example runs.

install_test.py BUILD CMAKE COMPILER COMPILE_FLAGS; all output is under BUILD/attention_install_test."""

import pathlib
import sys

from installed import EXAMPLE_OUTPUT, InstalledComponent, run

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parents[3] / "attention" / "c" / "examples"


def main(build, cmake, compiler, flags):
    component = InstalledComponent(build, cmake, "attention", pathlib.Path(build) / "attention_install_test")
    assert component.headers() == {"attention.h"}, f"installed {component.headers()}"
    consumer, _ = component.build_consumer(
        HERE, f"-DEXAMPLES={EXAMPLES}", f"-DCMAKE_C_COMPILER={compiler}", f"-DCMAKE_C_FLAGS={flags}"
    )
    output = run(consumer / "attention")
    print(output)
    assert output.splitlines() == EXAMPLE_OUTPUT, output


if __name__ == "__main__":
    main(*sys.argv[1:])
