"""A kernel file exports its table and nothing else; only AMX's has tile instructions.

Files compiled for different instruction sets must not share an inline function: the linker keeps one
copy for every machine, and that may be the AVX-512 one. The object files are the arguments.
"""

import pathlib
import re
import subprocess
import sys

TILES = re.compile(r"%tmm|ldtilecfg|tilerelease")

# nm's letters for data that exactly one object defines: initialised, read-only.
STRONG_DATA = "DR"


def exported(object_file):
    """(letter, name) of every symbol that other objects can see or replace."""
    command = ["nm", "--defined-only", "--extern-only", "--demangle", "--format=posix", object_file]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for line in lines:
        name, letter, *_ = line.rsplit(" ", 3)
        yield letter, name


def has_tiles(object_file):
    command = ["objdump", "--disassemble", "--no-show-raw-insn", object_file]
    return bool(TILES.search(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main(objects):
    wrong = []
    tiled = [pathlib.Path(path).name for path in objects if has_tiles(path)]
    assert tiled == ["kernels_amx.cc.o", "projection_amx.cc.o"], f"tile instructions are in {tiled}"
    for path in objects:
        symbols = list(exported(path))
        for letter, name in symbols:
            print(f"{pathlib.Path(path).name}: {letter} {name}")
        tables = [name for letter, name in symbols if letter in STRONG_DATA and name.endswith("Kernels")]
        if len(tables) != 1 or len(symbols) != 1:
            wrong.append(pathlib.Path(path).name)
    assert len(objects) >= 8, f"expected two objects for each instruction set, got {objects}"
    if wrong:
        sys.exit(f"these export more or less than their one table: {', '.join(wrong)}")
    print(f"{len(objects)} kernel objects, each exports its table alone")


if __name__ == "__main__":
    main(sys.argv[1:])
