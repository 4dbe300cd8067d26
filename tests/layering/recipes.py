"""Prints the files that a recipe of CONTRIBUTING.md touches, derived from an example in the tree.

    python3 tests/layering/recipes.py            the recipes
    python3 tests/layering/recipes.py attribute  the files of one, its tests after them
    python3 tests/layering/recipes.py --write    renew the lists in CONTRIBUTING.md

A recipe has an example that is in the tree already. The files that a new one touches are those that belong to the
example, or name it outside of comments and strings.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PRODUCTION = ("attention", "base", "server", "client", "proto")
SUFFIXES = (".h", ".cc", ".inc", ".proto", ".py", ".txt", ".map")
# Comments and string literals, also CMake comments; not the file names of includes.
IGNORED = re.compile(r'//[^\n]*|/\*.*?\*/|^\s*#(?!include)[^\n]*|(?<!include )"(?:[^"\\\n]|\\.)*"', re.MULTILINE | re.DOTALL)

# Recipe -> its example, the folder that belongs to the example (listed as a whole), and the regular expression by
# which other files name the example.
RECIPES = {
    "attribute": ("softcap", None, r"(?i)softcap(?!ped)"),
    "tensor": ("key_lengths", None, r"(?i)key_?lengths|nonpad_kv_seqlen"),
    "mechanism": ("softmax", "attention/mechanism/softmax/", r"mechanism/softmax/"),
    "backend": ("reference", "attention/reference/", r"\breference/reference_"),
    "instruction set": ("avx2", "attention/cpu/kernels_avx2.cc", r"(?i)avx2"),
    "model": ("attention", "server/protocols/oip/model.cc", r"\bkModelName\b|protocols/oip/model\.cc"),
    "transport": ("grpc", "server/wire/grpc/", r"\bwire/grpc/"),
}


def sources(tops):
    """(path, text without comments and strings) of every file below the folders `tops`."""
    for top in tops:
        for file in sorted((ROOT / top).rglob("*")):
            if file.suffix in SUFFIXES and file.is_file():
                yield file.relative_to(ROOT).as_posix(), IGNORED.sub("", file.read_text())


def files_of(recipe, tops=PRODUCTION):
    """The example's folder, then every other file that names the example."""
    _, folder, pattern = RECIPES[recipe]
    named = [path for path, text in sources(tops) if re.search(pattern, text)]
    if folder is None or tops is not PRODUCTION:
        return named
    return [folder] + [path for path in named if not path.startswith(folder)]


def block(recipe):
    """The lines of CONTRIBUTING.md that list a recipe's files."""
    return "\n".join([f"<!-- recipe {recipe} -->", *(f"- `{f}`" for f in files_of(recipe)), "<!-- end -->"])


def renewed(text):
    """Returns CONTRIBUTING.md with lists that match the tree."""
    for recipe in RECIPES:
        old = re.compile(f"<!-- recipe {recipe} -->.*?<!-- end -->", re.DOTALL)
        text, count = old.subn(lambda _: block(recipe), text)
        if count != 1:
            raise ValueError(f"CONTRIBUTING.md has {count} lists for the recipe '{recipe}', not 1")
    return text


def main(arguments):
    if not arguments:
        print("\n".join(RECIPES))
    elif arguments == ["--write"]:
        CONTRIBUTING.write_text(renewed(CONTRIBUTING.read_text()))
    elif len(arguments) == 1 and arguments[0] in RECIPES:
        recipe = arguments[0]
        print(f"as {RECIPES[recipe][0]}:")
        print("\n".join("  " + f for f in files_of(recipe)))
        print("tests:")
        tests = [f for f in files_of(recipe, ("tests",)) if not f.startswith("tests/layering/")]
        print("\n".join("  " + f for f in tests))
    else:
        sys.exit(f"recipes.py takes --write or one of: {', '.join(RECIPES)}; not '{' '.join(arguments)}'")


if __name__ == "__main__":
    main(sys.argv[1:])
