"""The verdicts of transformers_cases.py, a column for each version of transformers, and the table of docs/python.md, which
is made from them: `python tests/conformance/transformers_table.py` writes it."""

import collections
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
TABLE = HERE / "transformers_families.txt"
PAGE = HERE.parents[1] / "docs/python.md"
ABSENT = "-"
FIRST, LAST = "<!-- of transformers_families.txt -->\n", "<!-- end -->\n"
_MOST_NAMES = 12
_REFUSED = {
    "has attention of its own": "attention classes of their own",
    " passes ": "an argument",
    "is causal but has no mask": "a causal layer without a mask, for which transformers' implementations differ",
}


def read():
    """Version -> model type -> verdict, such as "equal" or "refused: why"."""
    (_, *versions), *rows = (line.split("\t") for line in TABLE.read_text().splitlines())
    return {
        version: {name: cells[n] for name, *cells in rows if cells[n] != ABSENT} for n, version in enumerate(versions)
    }


def merge(version, model_types, found):
    """Writes the verdicts found with a version. Those of its other model types stay."""
    columns = read() if TABLE.exists() else {}
    known = columns.get(version, {}) | found
    columns[version] = {name: known[name] for name in model_types if name in known}
    versions = sorted(columns)
    names = sorted({name for column in columns.values() for name in column})
    lines = [[name, *(columns[version].get(name, ABSENT) for version in versions)] for name in names]
    TABLE.write_text("".join("\t".join(line) + "\n" for line in [["model type", *versions], *lines]))


def _group(verdict):
    """What of a verdict the page has a row for: refused and not built by their kinds."""
    word, _, why = verdict.partition(": ")
    if verdict == "equal":
        return "the same, computed by rapt"
    if word == "equal":
        return "the same, by attention of their own, which gets the mask that it expects"
    if word == "refused":
        return "refused: " + next((kind for part, kind in _REFUSED.items() if part in why), "a mask that does not fit")
    return f"{word}: {why.partition(': ')[0]}"  # such as "not built: needs timm"


def markdown():
    """The page's table: how many model types each version has of each kind, and which."""
    columns = read()
    groups = collections.defaultdict(lambda: collections.defaultdict(list))
    for version, column in columns.items():
        for name, verdict in column.items():
            groups[_group(verdict)][version].append(name)
    versions = sorted(columns, reverse=True)
    lines = [f"| verdict | {' | '.join(versions)} | model types |", "| --- |" + " --- |" * (len(versions) + 1)]
    for group in sorted(groups, key=lambda x: (["the", "wro", "rai", "ref", "not"].index(x[:3]), x)):
        of = groups[group]
        names = list(dict.fromkeys(name for version in versions for name in of[version]))
        shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        lines.append(f"| {group} | {' | '.join(str(len(of[version])) for version in versions)} | {shown} |")
    counts = " | ".join(str(len(columns[version])) for version in versions)
    return "\n".join([*lines, f"| all | {counts} | |"]) + "\n"


def split_page():
    before, _, rest = PAGE.read_text().partition(FIRST)
    table, _, after = rest.partition(LAST)
    return before, table, after


if __name__ == "__main__":
    before, _, after = split_page()
    PAGE.write_text(before + FIRST + markdown() + LAST + after)
