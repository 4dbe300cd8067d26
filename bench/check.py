"""Compares the ratios of a bench with the recorded ones; run by `./dev bench check NAME`.

    check.py NAME RECORDED MEASURED [--whole]

RECORDED is bench/RESULTS.md, MEASURED the Markdown that the bench printed. Times differ from machine to machine;
ratios to a peer in the same run do much less. Prints each ratio that is worse than the recorded one by more than
TOLERANCE, and those that are missing from a --whole run, and exits with 1 if there is one.
"""

import re
import sys

TOLERANCE = 0.10
# The columns before the first of these tell rows apart.
MEASURED_COLUMN = re.compile(r"\b(ms|MiB|reached|ratio|calls/s|GB/s|ns/byte|us/call)\b|speed of|on the wire")


def section(text, name):
    """Returns the section of a bench in RESULTS.md."""
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]


def tables(text):
    """Yields the header and the rows of each table."""
    block = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif block:
            yield block[0], block[2:]
            block = []


def number(cell):
    try:
        return float(cell)
    except ValueError:
        return None


def ratios(text):
    """Maps what a row measures to its ratio, and to whether a larger one is better."""
    found = {}
    for header, rows in tables(text):
        if header[:2] == ["ratio", "reached"]:  # | ratio | reached | floor | aim | |
            for row in rows:
                value, floor, aim = (number(cell) for cell in row[1:4])
                if None not in (value, floor, aim):
                    found[row[0]] = (value, aim >= floor)
            continue
        columns = [n for n, name in enumerate(header) if name == "ratio"]
        keys = next((n for n, name in enumerate(header) if MEASURED_COLUMN.search(name)), 0)
        for row in rows:
            for column in columns:
                value = number(row[column])
                if value is not None:
                    against = [header[column - 1]] if len(columns) > 1 or keys == 0 else []
                    found[" ".join(filter(None, [*row[:keys], *against]))] = (value, True)
    return found


def worse(recorded, measured):
    """Yields what is worse, with both ratios."""
    for name, (value, larger) in measured.items():
        if name not in recorded:
            continue
        before = recorded[name][0]
        if value < before * (1 - TOLERANCE) if larger else value > before * (1 + TOLERANCE):
            yield name, before, value


def main(name, recorded_path, measured_path, *flags):
    with open(recorded_path, encoding="utf-8") as file:
        recorded = ratios(section(file.read(), name))
    with open(measured_path, encoding="utf-8") as file:
        measured = ratios(file.read())
    compared = recorded.keys() & measured.keys()
    if not compared:
        sys.exit(f"check: no ratio of {name} is recorded in {recorded_path}")
    slower = list(worse(recorded, measured))
    for case, before, value in slower:
        print(f"{case}: {value:g}, recorded {before:g}")
    missing = sorted(recorded.keys() - measured.keys()) if "--whole" in flags else []
    for case in missing:
        print(f"{case}: not measured, recorded {recorded[case][0]:g}")
    print(f"check: {len(slower)} of {len(compared)} ratios of {name} are worse by more than {TOLERANCE:.0%}")
    return 1 if slower or missing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
