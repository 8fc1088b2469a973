"""Tests of bench_turns.py."""

import contextlib
import io
import os
import stat
import subprocess
import tempfile
import unittest

import bench_turns

# Does nothing, and has a process that does nothing.
IDLE = ["/bin/sh", "-c", "sleep 1000 & wait"]


def results(**p50):
    """Of a suite of one size; names have no blanks here."""
    return {"results": [{
        "benchmark": "small", "what": "all_reduce", "ranks": 2, "bytes": 4,
        "contenders": [{"name": name, "p50_ns": ns, "p50_least_ns": ns / 2, "p99_ns": 3 * ns}
                       for name, ns in p50.items()] + [{"name": "hopeless"}]}]}


class BuildTest(unittest.TestCase):
    def setUp(self):
        self.builds = []
        for name in ("before", "after"):
            self.builds.append(bench_turns.Build(name, IDLE, subprocess.DEVNULL))
            self.addCleanup(self.builds[-1].end)
            while len(self.builds[-1].processes()) < 2:
                pass

    def states(self):
        return [sorted(set(build.processes().values())) for build in self.builds]

    def test_all_that_it_has_started_is_stopped_and_nothing_else(self):
        self.builds[0].stop()
        self.assertEqual(self.states(), [["T"], ["S"]])
        self.builds[1].stop()
        self.assertEqual(self.states(), [["T"], ["T"]])
        self.builds[0].go_on()
        while "T" in self.states()[0]:
            pass
        self.assertEqual(self.states()[1], ["T"])

    def test_what_is_stopped_can_be_ended(self):
        self.builds[0].stop()
        self.assertNotEqual(self.builds[0].end(), 0)
        while self.builds[0].processes():
            pass

    def test_one_that_has_ended_says_how(self):
        quick = bench_turns.Build("quick", ["/bin/sh", "-c", "exit 3"], subprocess.DEVNULL)
        self.assertEqual(bench_turns.take_turns([quick], 1), [3])


class CompareTest(unittest.TestCase):
    def test_ratios_are_after_over_before(self):
        rows = bench_turns.compare([(results(chorus=8, peer=2), results(chorus=4, peer=3)),
                                    (results(chorus=8, peer=2), results(chorus=8, peer=3))])
        self.assertEqual([row.split() for row in rows], [
            ["suite", "what", "ranks", "contender", "of", "p50", "least", "p99"],
            ["small", "all_reduce", "2", "chorus", "2", "0.71", "0.71", "0.71"],
            ["small", "all_reduce", "2", "peer", "2", "1.50", "1.50", "1.50"]])

    def test_what_one_has_alone_is_left_out(self):
        rows = bench_turns.compare([(results(old=1, both=1), results(both=1, new=1))])
        self.assertEqual(len(rows), 2)
        self.assertIn("both", rows[1])


class MainTest(unittest.TestCase):
    def build(self, script):
        """A directory with a chorus_bench that is a script of this one's; $1 is its --daemon."""
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        os.mkdir(os.path.join(scratch.name, "benchmarks"))
        program = os.path.join(scratch.name, "benchmarks/chorus_bench")
        with open(program, "w") as file:
            file.write("#!/bin/sh\n" + script)
        os.chmod(program, os.stat(program).st_mode | stat.S_IXUSR)
        return scratch.name

    def test_both_are_run_with_the_arguments(self):
        writes = """test "$3 $4" = "--quick small" || exit 1
        cat > "${2#--json=}" <<END
        {"results": [{"benchmark": "small", "what": "$(basename "${1#--daemon=}")", "ranks": 2, "bytes": 4,
          "contenders": [{"name": "chorus", "p50_ns": %d, "p50_least_ns": 1, "p99_ns": 1}]}]}
END
        """
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            bench_turns.main(["--times=2", "--slice=0.01", self.build(writes % 4),
                              self.build(writes % 6), "--quick", "small"])
        self.assertEqual(printed.getvalue().splitlines()[-1].split(),
                         ["small", "chorusd", "2", "chorus", "2", "1.50", "1.00", "1.00"])

    def test_one_that_fails_ends_both_with_what_it_said(self):
        with self.assertRaises(SystemExit) as raised:
            bench_turns.main([self.build("echo no daemon; exit 2"), self.build("exit 0")])
        self.assertIn("no daemon\nbench_turns: chorus_bench of", str(raised.exception))


if __name__ == "__main__":
    unittest.main()
