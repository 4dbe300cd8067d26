"""Every fault of this folder has exactly one place in the production tree, and a test that must detect it."""

import unittest

import mutate

TESTS = mutate.ROOT / "tests"


class FaultsTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.faults = mutate.load_faults()

    def test_each_has_one_place(self):
        sources = mutate.load_sources(mutate.ROOT)
        counts = {fault.name: len(fault.places(sources)) for fault in self.faults}
        wrong = {name: count for name, count in counts.items() if count != 1}
        self.assertEqual(wrong, {}, "give `before` the code of today, with a neighbouring line if several places have it")

    def test_each_is_killed_by_a_test_of_this_tree(self):
        binaries = "".join(file.read_text() for file in TESTS.rglob("CMakeLists.txt"))
        for fault in self.faults:
            with self.subTest(fault.name):
                self.assertRegex(fault.kill, r"^\S+ \S")
                if fault.test.endswith(".py"):
                    self.assertTrue((mutate.ROOT / fault.test).is_file(), fault.test)
                else:
                    self.assertRegex(binaries, rf"\b{fault.test}\b")

    def test_names_are_unique(self):
        names = [fault.name for fault in self.faults]
        self.assertEqual(len(names), len(set(names)))


class PlacesTest(unittest.TestCase):
    fault = mutate.Fault("name", "fault", "x_test *", before="if (a) return b(c,\n   d);", after="return;")

    def test_is_found_in_any_file_and_layout(self):
        sources = {"x.cc": "int x;\n", "y.cc": "{\n\tif (a)\n\t\treturn b(c, d);\n}\n"}
        ((path, match),) = self.fault.places(sources)
        self.assertEqual(path, "y.cc")
        self.assertEqual(self.fault.planted(match), "{\n\treturn;\n}\n")

    def test_each_copy_is_a_place(self):
        line = "if (a) return b(c, d);\n"
        self.assertEqual(len(self.fault.places({"x.cc": line + line, "y.cc": line})), 3)


if __name__ == "__main__":
    unittest.main()
