"""librapt_attention.so exports only the functions of rapt/attention.h and depends only on libstdc++.

exports_test.py LIBRARY HEADER"""

import pathlib
import re
import subprocess
import sys

# libstdc++ and its own dependencies.
ALLOWED = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(library, header):
    declared = set(re.findall(r"\b(rapt_\w+)\(", pathlib.Path(header).read_text(encoding="utf-8")))
    assert len(declared) >= 8, declared
    symbols = [line.split() for line in output("nm", "--dynamic", "--defined-only", library).splitlines()]
    versions = {name for *_, letter, name in symbols if letter == "A"}
    exported = {name.split("@")[0] for *_, letter, name in symbols if letter != "A"}
    assert versions == {"RAPT_0"}, versions
    assert exported == declared, f"exported {exported}, declared {declared}"

    needed = set(re.findall(r"\(NEEDED\)\s+Shared library: \[(.*?)\]", output("readelf", "--dynamic", library)))
    assert needed and needed <= ALLOWED, f"needs {needed - ALLOWED}"
    loaded = set(re.findall(r"^\s*(?:\S*/)?(\S+\.so\S*) ", output("ldd", library), re.MULTILINE))
    assert loaded - {"linux-vdso.so.1"} <= ALLOWED, f"loads {loaded}"
    print(f"{len(exported)} functions: {', '.join(sorted(exported))}; needs {', '.join(sorted(needed))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
