"""Tests of gpu_torch.py beside the rows that gpu_bench writes, without PyTorch."""

import collections
import contextlib
import io
import json
import os
import subprocess
import tempfile
import unittest

import gpu_torch

BENCH = "core/backend/cuda/testing/gpu_bench"


def bench(*arguments):
    # On the stand-in, whatever the machine has.
    environment = {name: value for name, value in os.environ.items() if name != "CHORUS_TEST_GPU"}
    return subprocess.run(
        [BENCH, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        universal_newlines=True,
        env=environment,
    ).stdout


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def run(arguments):
    """The exit status, and what was told."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        status = gpu_torch.main(arguments)
    return status, told.getvalue()


class RowsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.listed = rows_of(bench("--list"))

    def test_each_op_has_a_form_in_pytorch_and_each_form_a_row(self):
        self.assertEqual({row["op"] for row in self.listed}, set(gpu_torch.OPS))

    def test_names_tell_rows_apart(self):
        names = collections.Counter(row["name"] for row in self.listed)
        self.assertEqual([name for name, count in names.items() if count > 1], [])

    def test_rows_say_what_has_to_be_moved(self):
        self.assertEqual([row["name"] for row in self.listed if row["bytes"] <= 0], [])

    def test_each_row_runs_on_the_stand_in(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "rows")
            table = bench("--ops", "--smoke", "--out=" + path)
            with open(path, encoding="utf-8") as lines:
                rows = rows_of(lines.read())
            self.assertEqual([row["op"] for row in rows], [row["op"] for row in self.listed])
            for row in rows:
                self.assertGreater(row["us"], 0, row["name"])
                self.assertIn("| %s | %.2f |" % (row["name"], row["us"]), table)
            self.assertEqual(run(["--check", path]), (0, ""))

    def test_rows_beyond_the_limit_are_told(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "rows")
            table = bench("--ops", "--smoke", "--limit=1e-9", "--out=" + path)
            with open(path, encoding="utf-8") as lines:
                rows = rows_of(lines.read())
            self.assertEqual({row["us"] for row in rows}, {None})
            self.assertEqual(table.count("left out"), len(rows))

    def test_what_gpu_bench_does_not_know_is_refused(self):
        for arguments in (["--ops", "--what"], ["--smoke"], ["--ops", "--list"], ["--limit=x"]):
            status = subprocess.run([BENCH, *arguments], stderr=subprocess.DEVNULL).returncode
            self.assertEqual(status, 2, arguments)


class CheckTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = os.path.join(self.folder.name, "rows")

    def write(self, *ops):
        with open(self.path, "w", encoding="utf-8") as rows:
            rows.writelines(json.dumps({"op": op}) + "\n" for op in ops)

    def test_an_op_without_a_form_is_an_error_before_anything_is_measured(self):
        self.write("add", "made_up")
        for arguments in ([self.path], ["--check", self.path]):
            status, told = run(arguments)
            self.assertEqual(status, 2)
            self.assertIn("made_up", told)
            self.assertNotIn("add", told)

    def test_no_rows_are_an_error(self):
        self.write()
        self.assertEqual(run(["--check", self.path])[0], 2)


class TableTest(unittest.TestCase):
    def row(self, family, us, torch_us, **more):
        return dict(name="op of " + family, family=family, us=us, torch_us=torch_us, **more)

    def test_ratios_are_ours_over_theirs_and_their_mean_is_geometric(self):
        lines = gpu_torch.table([self.row("a", 20, 10), self.row("a", 40, 5), self.row("b", 1, 4)])
        self.assertIn("| op of a | 20.00 | 10.00 | 2.00 |", lines)
        self.assertIn("| op of b | 1.00 | 4.00 | 0.25 |", lines)
        self.assertIn("| a | 2 | 4.00 |", lines)
        self.assertIn("| b | 1 | 0.25 |", lines)

    def test_what_was_not_measured_is_told_and_has_no_ratio(self):
        lines = gpu_torch.table(
            [
                self.row("a", None, 10),
                self.row("b", 10, None),
                self.row("c", 10, None, torch_error="RuntimeError: no such kernel"),
            ]
        )
        self.assertIn("| op of a | left out | 10.00 |  |", lines)
        self.assertIn("| op of b | 10.00 | left out |  |", lines)
        self.assertIn("| op of c | 10.00 | failed |  |", lines)
        self.assertIn("PyTorch, op of c: RuntimeError: no such kernel", lines)
        self.assertFalse([line for line in lines if line.startswith("| a |")])


if __name__ == "__main__":
    unittest.main()
