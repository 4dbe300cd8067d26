"""CONTRIBUTING.md lists the files that the recipes touch in this tree."""

import subprocess
import sys
import unittest

import recipes


class RecipesTest(unittest.TestCase):
    maxDiff = None

    def test_contributing_matches_the_tree(self):
        text = recipes.CONTRIBUTING.read_text()
        self.assertEqual(text, recipes.renewed(text), "run: python3 tests/layering/recipes.py --write")

    def test_every_example_is_in_the_tree_and_has_tests(self):
        for recipe, (_, folder, _) in recipes.RECIPES.items():
            if folder is not None:
                self.assertTrue((recipes.ROOT / folder).exists(), folder)
            self.assertGreater(len(recipes.files_of(recipe)), 2, recipe)

    def test_files_that_only_mention_the_example_are_groups_of_their_own(self):
        groups = recipes.groups("attribute")
        self.assertIn("attention/problem_text.h", groups["comments and texts"])
        self.assertIn("README.md", groups["documents"])
        self.assertIn("tests/mutants/softcap_after_mask.patch", groups["mutants"])
        self.assertIn("tests/conformance/triton_client_test.py", groups["tests, in comments and texts"])
        everything = [f for files in groups.values() for f in files]
        self.assertEqual(len(everything), len(set(everything)))

    def test_a_closed_pipe_is_no_error(self):
        command = [sys.executable, "-B", recipes.__file__, "tensor"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            self.assertEqual(process.stderr.read(), b"")

    def test_comments_and_strings_do_not_count(self):
        code = '// softcap\nint x; /* softcap\n softcap */\n#include "a/softcap.h"\nf("softcap", softcap, "\\"");\n'
        self.assertEqual(recipes.IGNORED.sub("", code).count("softcap"), 2)


if __name__ == "__main__":
    unittest.main()
