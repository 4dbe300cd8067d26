#!/usr/bin/env python3
"""Plants each fault of tests/mutants/*.toml in a copy of the tree and runs the tests that must detect it.

    tests/mutants/mutate.py [regex]     `./dev mutate` calls it; the regex picks faults by name

Fails if a fault survives, has not exactly one place or does not compile. A fault:

    [name]
    fault = 'description of the fault'
    kill = 'test_binary gtest-filter', or a Python suite and the expression of pytest's -k
    needs = 'avx512f'  # optional: a CPU flag of /proc/cpuinfo without which no test can notice the fault
    before = 'code'    # stands at one place of the production tree, in any file, with any line breaks and indentation
    after = 'code'
"""

import dataclasses
import fcntl
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRODUCTION = ("attention", "base", "call", "client", "proto", "server")
SUFFIXES = (".c", ".cc", ".h", ".inc", ".proto", ".py")
WORK = ROOT / "build/mutants"
TREE = WORK / "tree"
BUILD = WORK / "build"
LOG = WORK / "last.log"
TEST_SECONDS = "120"  # a test that hangs has detected the fault


@dataclasses.dataclass
class Fault:
    name: str
    fault: str
    kill: str
    before: str
    after: str
    needs: str = ""

    @property
    def test(self):
        return self.kill.split(" ", 1)[0]

    @property
    def filter(self):
        return self.kill.split(" ", 1)[1]

    def targets(self):
        return ["rapt-server", "rapt_attention_shared"] if self.test.endswith(".py") else [self.test]

    def can_be_noticed(self):
        return not self.needs or self.needs in pathlib.Path("/proc/cpuinfo").read_text().split()

    def places(self, sources):
        """Returns where `before` stands: pairs of a key of `sources` and the match in its text."""
        pattern = re.compile(r"\s+".join(map(re.escape, self.before.split())))
        return [(path, match) for path, text in sources.items() for match in pattern.finditer(text)]

    def planted(self, match):
        """Returns the text of the match with the fault."""
        return match.string[: match.start()] + self.after.strip() + match.string[match.end() :]


def load_faults():
    tables = [tomllib.loads(file.read_text()) for file in sorted(pathlib.Path(__file__).parent.glob("*.toml"))]
    return [Fault(name, **fields) for table in tables for name, fields in table.items()]


def load_sources(root):
    files = [file for top in PRODUCTION for file in sorted((root / top).rglob("*")) if file.suffix in SUFFIXES]
    return {file: file.read_text() for file in files}


def copy_tree():
    """Replaces all files, so that no fault of an earlier run remains; ccache avoids recompilation."""
    shutil.rmtree(TREE, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(os.path.lexists, names.split("\0")):
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, TREE / name, follow_symlinks=False)


def run(command, **options):
    """Returns whether the command succeeds; its output goes to LOG."""
    with LOG.open("w") as log:
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, **options).returncode == 0


def compile_targets(targets):
    return run(["cmake", "--build", BUILD, "--target", *targets])


def run_test(fault):
    """After TEST_SECONDS, SIGKILL ends the process group, with servers that would ignore SIGTERM or drain."""
    command = [BUILD / "bin" / fault.test, f"--gtest_filter={fault.filter}", "--gtest_brief=1"]
    environment = dict(os.environ)
    if fault.test.endswith(".py"):
        environment["PYTHONPATH"] = f"{TREE}/client/python:{TREE}/tests/conformance"
        environment["RAPT_LIBRARY"] = f"{BUILD}/lib/librapt_attention.so"
        environment["RAPT_SERVER"] = f"{BUILD}/bin/rapt-server"
        pytest = [ROOT / "build/python/bin/python", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command = [*pytest, "-k", fault.filter, TREE / fault.test]
    return run(["timeout", "--signal=KILL", TEST_SECONDS, *command], env=environment)


def prepare(faults):
    copy_tree()
    options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
    if not run(["cmake", "-S", TREE, "-B", BUILD, *options]):
        fail_with_log("the tree does not configure")
    if not compile_targets({target: None for fault in faults for target in fault.targets()}):
        fail_with_log("the tree does not build")
    for fault in {fault.kill: fault for fault in faults}.values():
        if not run_test(fault):
            fail_with_log(f"{fault.kill} fails without a fault")


def verdict(fault, sources):
    """Returns killed, or the reason why not."""
    places = fault.places(sources)
    if len(places) != 1:
        return f"{len(places)} PLACES"
    if not fault.can_be_noticed():
        return "not run"
    path, match = places[0]
    path.write_text(fault.planted(match))
    try:
        if not compile_targets(fault.targets()):
            return "DOES NOT BUILD"
        return "SURVIVED" if run_test(fault) else "killed"
    finally:
        path.write_text(match.string)


def fail(message):
    sys.exit(f"mutate: {message}")


def fail_with_log(message):
    print(*LOG.read_text().splitlines()[-40:], sep="\n", file=sys.stderr)
    fail(message)


def main(regex=""):
    os.chdir(ROOT)
    WORK.mkdir(parents=True, exist_ok=True)
    lock = open(WORK / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"another run is using {WORK}")
    faults = [fault for fault in load_faults() if re.search(regex, fault.name)]
    if not faults:
        fail(f"no fault matches '{regex}'")
    prepare(faults)
    sources = load_sources(TREE)
    outcomes = []
    for fault in faults:
        outcomes.append(verdict(fault, sources))
        print(f"{outcomes[-1]:15} {fault.name:40} {fault.fault}", flush=True)
    not_run = outcomes.count("not run")
    survivors = len(faults) - not_run - outcomes.count("killed")
    if survivors:
        fail(f"{survivors} of {len(faults)} faults were not killed")
    print(f"mutate: {len(faults) - not_run} faults planted, all killed; {not_run} need another CPU")


if __name__ == "__main__":
    main(*sys.argv[1:])
