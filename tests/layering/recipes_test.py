"""CONTRIBUTING.md lists the files that the recipes touch in this tree."""

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

    def test_comments_and_strings_do_not_count(self):
        code = '// softcap\nint x; /* softcap\n softcap */\n#include "a/softcap.h"\nf("softcap", softcap, "\\"");\n'
        self.assertEqual(recipes.IGNORED.sub("", code).count("softcap"), 2)


if __name__ == "__main__":
    unittest.main()
