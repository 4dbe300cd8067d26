"""`./dev bench check` on tables like those of the benches."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import check  # noqa: E402

RECORDED = """<!-- kernel -->
## kernel

| case | type | rapt ms | PyTorch ms | ratio | of peak |
| --- | --- | --- | --- | --- | --- |
| prefill | FP32 | 10 | 20 | 2.00 | 80% |
| decode | FP32 | 10 | 15 | 1.50 | 80% |
| decode | BF16 | 10 | - | - | 80% |
<!-- end of kernel -->
<!-- rest -->
| ratio | reached | floor | aim | |
| --- | --- | --- | --- | --- |
| speed of gRPC | 1.40 | 0.90 | 1.00 | aim |
| peak memory | 1.00 | 1.10 | 1.06 | aim |
<!-- end of rest -->
"""


def table(rows):
    return "| case | type | rapt ms | PyTorch ms | ratio |\n| --- | --- | --- | --- | --- |\n" + rows


class CheckTest(unittest.TestCase):
    def check(self, name, measured, *flags):
        """Returns the exit status and the lines."""
        with tempfile.TemporaryDirectory() as folder:
            paths = [pathlib.Path(folder, file) for file in ("recorded", "measured")]
            for path, text in zip(paths, (RECORDED, measured), strict=True):
                path.write_text(text, encoding="utf-8")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                status = check.main(name, *paths, *flags)
        return status, printed.getvalue().splitlines()

    def test_a_slower_machine_with_the_same_ratios_passes(self):
        status, lines = self.check("kernel", table("| prefill | FP32 | 30 | 55 | 1.83 |\n| decode | FP32 | 20 | 30 | 1.50 |"))
        self.assertEqual(status, 0)
        self.assertEqual(lines, ["check: 0 of 2 ratios of kernel are worse by more than 10%"])

    def test_a_ratio_below_nine_tenths_fails(self):
        status, lines = self.check("kernel", table("| prefill | FP32 | 10 | 17 | 1.79 |\n| decode | FP32 | 9 | 20 | 2.22 |"))
        self.assertEqual(status, 1)
        self.assertEqual(lines[0], "prefill FP32: 1.79, recorded 2")

    def test_a_ratio_that_a_whole_run_lacks_fails(self):
        rows = table("| prefill | FP32 | 10 | 20 | 2 |\n| decode | FP32 | 10 | - | - |")
        self.assertEqual(self.check("kernel", rows)[0], 0)
        status, lines = self.check("kernel", rows, "--whole")
        self.assertEqual(status, 1)
        self.assertEqual(lines[0], "decode FP32: not measured, recorded 1.5")

    def test_less_is_better_where_the_aim_is_below_the_floor(self):
        header = "| ratio | reached | floor | aim | |\n| --- | --- | --- | --- | --- |\n"
        status, lines = self.check("rest", header + "| peak memory | 1.20 | 1.10 | 1.06 | missed |\n| speed of gRPC | 1.3 | 0.9 | 1 | aim |")
        self.assertEqual(status, 1)
        self.assertEqual(lines[0], "peak memory: 1.2, recorded 1")
        status, _ = self.check("rest", header + "| peak memory | 0.50 | 1.10 | 1.06 | aim |")
        self.assertEqual(status, 0)

    def test_a_bench_without_recorded_ratios_is_an_error(self):
        with self.assertRaisesRegex(SystemExit, "no ratio of wire is recorded"):
            self.check("wire", table("| prefill | FP32 | 10 | 20 | 2 |"))

    def test_every_recorded_ratio_has_a_name_of_its_own(self):
        results = (ROOT / "bench/RESULTS.md").read_text(encoding="utf-8")
        for name in ("kernel", "variant", "backward", "linear", "rest", "wire", "stream", "cache"):
            text = check.section(results, name)
            cells = sum(
                check.number(row[column]) is not None
                for header, rows in check.tables(text)
                for row in rows
                for column, title in enumerate(header)
                if title == ("reached" if header[0] == "ratio" else "ratio")
            )
            self.assertEqual(len(check.ratios(text)), cells, name)
            self.assertGreater(cells, 0, name)


if __name__ == "__main__":
    unittest.main()
