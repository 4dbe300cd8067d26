"""Prints the files that a recipe of CONTRIBUTING.md touches, derived from an example in the tree.

    python3 tests/layering/recipes.py            the recipes
    python3 tests/layering/recipes.py attribute  the files of one, in groups: code, comments and texts, documents, tests, ...
    python3 tests/layering/recipes.py --write    renew the lists in CONTRIBUTING.md

A recipe has an example that is in the tree already. The files that a new one touches are those that belong to the
example, or name it outside of comments and strings; CONTRIBUTING.md lists them. Files that name it in a comment or
string may have to mention the new one; they are printed as groups of their own.
"""

import functools
import pathlib
import re
import signal
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
    "model": ("rotary_embedding", "server/protocols/oip/model.cc", r"\bkRotaryEmbedding\b|positions/rotary_embedding\.(cc|h)|protocols/oip/model\.cc"),
    "transport": ("http2", "server/wire/http2/", r"\bwire/http2/"),
}


def files_below(tops, suffixes=SUFFIXES):
    """Every file below the folders `tops`, and those of `tops` that are files."""
    for top in tops:
        for file in [ROOT / top, *sorted((ROOT / top).rglob("*"))]:
            if file.is_file() and file.suffix in suffixes:
                yield file.relative_to(ROOT).as_posix(), file.read_text()


@functools.cache
def code_of(text):
    return IGNORED.sub("", text)


def files_of(recipe, tops=PRODUCTION):
    """The example's folder, then every other file whose code names the example."""
    _, folder, pattern = RECIPES[recipe]
    named = [path for path, text in files_below(tops) if re.search(pattern, text) and re.search(pattern, code_of(text))]
    if folder is None or tops is not PRODUCTION:
        return named
    return [folder] + [path for path in named if not path.startswith(folder)]


def mentions_of(recipe, tops, suffixes=SUFFIXES):
    """The files that name the example, be it in a comment or a string."""
    _, folder, pattern = RECIPES[recipe]
    return [path for path, text in files_below(tops, suffixes) if re.search(pattern, text) and not (folder and path.startswith(folder))]


def groups(recipe):
    """Title -> files, in the order in which they are printed."""
    code = files_of(recipe)
    tests = files_of(recipe, ("tests",))
    return {
        f"as {RECIPES[recipe][0]}": code,
        "comments and texts": [f for f in mentions_of(recipe, PRODUCTION) if f not in code],
        "documents": mentions_of(recipe, ("README.md", "CHANGELOG.md", "docs"), (".md",)),
        "benchmarks": mentions_of(recipe, ("bench",)),
        "tests": [f for f in tests if not f.startswith("tests/layering/")],
        "tests, in comments and texts": [f for f in mentions_of(recipe, ("tests",)) if f not in tests and not f.startswith("tests/layering/")],
        "mutants": mentions_of(recipe, ("tests/mutants",), (".patch",)),
    }


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
        for title, files in groups(arguments[0]).items():
            print(f"{title}:", *files, sep="\n  ")
    else:
        sys.exit(f"recipes.py takes --write or one of: {', '.join(RECIPES)}; not '{' '.join(arguments)}'")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when piped to head
    main(sys.argv[1:])
