"""Installs a component of the build tree and builds a consumer against it."""

import pathlib
import shutil
import subprocess

# The output of the examples of the C interface and of the client library.
EXAMPLE_OUTPUT = [
    "token 0: weights 1.0000 0.0000 0.0000, y 1.0000 0.0000 1.0000 0.0000",
    "token 1: weights 0.2689 0.7311 0.0000, y 0.2689 0.7311 0.2689 0.7311",
    "token 2: weights 0.2741 0.2741 0.4519, y 0.7259 0.7259 0.2741 0.2741",
]


def run(*command):
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0, f"{' '.join(map(str, command))} ended with {ran.returncode}:\n{ran.stdout}"
    return ran.stdout


class InstalledComponent:
    """A component of `build`, installed below `root` and then moved: no installed file may hold an absolute path."""

    def __init__(self, build, cmake, component, root):
        self._cmake = cmake
        self._root = pathlib.Path(root)
        shutil.rmtree(self._root, ignore_errors=True)
        installed = self._root / "prefix"
        run(cmake, "--install", build, "--prefix", installed, "--component", component)
        self.prefix = self._root / "moved"
        installed.rename(self.prefix)

    def headers(self):
        return {path.name for path in (self.prefix / "include" / "rapt").iterdir()}

    def build_consumer(self, source, *definitions):
        """The build folder of the project `source`, which finds the component, and the build's log."""
        folder = self._root / "build"
        run(self._cmake, "-G", "Ninja", "-S", source, "-B", folder, f"-DCMAKE_PREFIX_PATH={self.prefix}", *definitions)
        return folder, run(self._cmake, "--build", folder, "--verbose")
