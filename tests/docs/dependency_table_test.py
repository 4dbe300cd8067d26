"""The dependency rules in docs/ARCHITECTURE.md equal those of tests/layering/layering_test.py."""

import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/layering"))

from layering_test import ATTENTION, KNOWS_JSON, KNOWS_WIRE_LIBRARIES, RULES  # noqa: E402


def section():
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    return text.split("## Dependency rules\n", 1)[1].split("\n## ", 1)[0]


def code(names):
    return ", ".join("attention headers" if name is ATTENTION else f"`{name}`" for name in names)


class DependencyTableTest(unittest.TestCase):
    def test_the_table_equals_the_rules(self):
        expected = "\n".join(f"| `{part}` | {code(allowed) or '-'} |" for part, allowed in RULES.items())
        rows = [line for line in section().splitlines() if line.startswith("| `")]
        self.assertEqual("\n".join(rows), expected, f"the table must be:\n{expected}")

    def test_the_text_lists_the_users_of_the_network_libraries(self):
        expected = f"Only {code(KNOWS_WIRE_LIBRARIES)} "
        self.assertIn(expected, " ".join(section().split()), f"the text must be: {expected}")

    def test_the_text_lists_the_users_of_json(self):
        expected = f"Only {' and '.join(code(KNOWS_JSON).rsplit(', ', 1))} may include nlohmann's JSON."
        self.assertIn(expected, " ".join(section().split()), f"the text must be: {expected}")

    def test_the_text_defines_the_attention_headers(self):
        expected = f"Attention headers are {code(ATTENTION)}."
        self.assertIn(expected, " ".join(section().split()), f"the text must be: {expected}")


if __name__ == "__main__":
    unittest.main()
