"""Every production source file has a test.

A test covers x/y.cc or x/y.inc when it is tests/x/y_test.cc, or includes the header of y.cc. Every other file has a row in
covered_by.txt that names the test through which its behaviour is checked.
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = pathlib.Path(__file__).with_name("covered_by.txt")
TOPS = ("attention", "base", "server", "client")
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def production_files():
    return sorted(f.relative_to(ROOT).as_posix() for top in TOPS for f in (ROOT / top).rglob("*") if f.suffix in (".cc", ".inc"))


def headers_in_tests():
    return {name for file in (ROOT / "tests").rglob("*_test.cc") for name in INCLUDE.findall(file.read_text())}


def own_test(source, headers):
    """Returns whether a test file mirrors the source file or includes its header."""
    stem = source.rsplit(".", 1)[0]
    public = "rapt/" + pathlib.PurePath(stem).name + ".h"  # the client library's
    return (
        (ROOT / "tests" / f"{stem}_test.cc").exists()
        or f"{stem}.h" in headers
        or (source.startswith("client/cpp/") and public in headers)
    )


def rows(text):
    """Source file -> the test that covers it."""
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert all(len(line) == 2 for line in lines), "a row of covered_by.txt must be a source file and a test"
    return dict(lines)


class CoveredTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.rows = rows(TABLE.read_text())
        headers = headers_in_tests()
        self.uncovered = [source for source in production_files() if not own_test(source, headers)]

    def test_every_source_file_has_a_test(self):
        missing = [source for source in self.uncovered if source not in self.rows]
        self.assertEqual(missing, [], f"add a test, or a row to {TABLE.name}")

    def test_the_table_lists_nothing_else(self):
        surplus = [source for source in self.rows if source not in self.uncovered]
        self.assertEqual(surplus, [], f"these files do not exist or have their own test: remove them from {TABLE.name}")

    def test_every_listed_test_exists(self):
        missing = [test for test in self.rows.values() if not (ROOT / test).is_file()]
        self.assertEqual(missing, [])


if __name__ == "__main__":
    unittest.main()
