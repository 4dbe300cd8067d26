"""Every test named by the table of faults in docs/operations.md exists."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

TEST_CASE = re.compile(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", re.MULTILINE)
NAMED = re.compile(r"`(\w+Test)\.(\w+)`")


def cases_in_tests():
    return {case for file in (ROOT / "tests").rglob("*.cc") for case in TEST_CASE.findall(file.read_text())}


def rows_of_table():
    text = (ROOT / "docs/operations.md").read_text()
    section = text.split("# Faults\n", 1)[1].split("\n# ", 1)[0]
    return [line for line in section.splitlines() if line.startswith("| ")][2:]


class FaultsTableTest(unittest.TestCase):
    def test_every_row_names_tests_that_exist(self):
        cases = cases_in_tests()
        self.assertGreater(len(cases), 100)
        rows = rows_of_table()
        self.assertGreater(len(rows), 10)
        for row in rows:
            named = NAMED.findall(row.rsplit("|", 2)[1])
            self.assertTrue(named, f"no test is named in: {row}")
            for case in named:
                self.assertIn(case, cases, row)


if __name__ == "__main__":
    unittest.main()
