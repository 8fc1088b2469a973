"""Tests of count_tests.py, on build events like those that Bazel writes."""

import contextlib
import io
import json
import os
import tempfile
import unittest

import count_tests

GTEST = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="4" failures="1" disabled="1" errors="0" name="AllTests">
  <testsuite name="Ring" tests="4" failures="1" disabled="1" skipped="1" errors="0">
    <testcase name="Works" status="run" result="completed" classname="Ring" />
    <testcase name="Breaks" status="run" result="completed" classname="Ring">
      <failure message="ring_test.cc:7&#x0A;Value of: false" type=""><![CDATA[...]]></failure>
    </testcase>
    <testcase name="Waits" status="run" result="skipped" classname="Ring">
      <skipped message="ring_test.cc:9&#x0A;no futex here&#x0A;"><![CDATA[...]]></skipped>
    </testcase>
    <testcase name="DISABLED_Later" status="notrun" result="suppressed" classname="Ring" />
  </testsuite>
</testsuites>
"""

PASSING = """<testsuites><testsuite>
<testcase name="A" status="run" classname="S"/><testcase name="B" status="run" classname="S"/>
</testsuite></testsuites>"""

# What Bazel writes for a test that wrote no test.xml of its own.
CRASH = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites><testsuite name="core/ring_test" tests="1" failures="0" errors="1">
<testcase name="core/ring_test" status="run" duration="0" time="0">
<error message="exited with error code 134"></error></testcase>
<system-out>Generated test.log</system-out></testsuite></testsuites>"""

SKIPPING = """<testsuites><testsuite><testcase name="A" status="run" classname="S">
<skipped message="f.cc:1&#x0A;why"/></testcase></testsuite></testsuites>"""

EMPTY = "<testsuites tests='0'></testsuites>"


class CountTest(unittest.TestCase):
    def setUp(self):
        self._directory = tempfile.TemporaryDirectory(prefix="count tests ")
        self.addCleanup(self._directory.cleanup)
        self._files = 0
        self.events = []

    def _file(self, text):
        self._files += 1
        path = os.path.join(self._directory.name, "%d.xml" % self._files)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def configured(self, label, size="SMALL"):
        self.events.append({
            "id": {"targetConfigured": {"label": label}},
            "configured": {"targetKind": "cc_test rule", "testSize": size} if size else {},
        })

    def completed(self, label, **event):
        self.events.append({"id": {"targetCompleted": {"label": label}}, **event})

    def result(self, label, xml, status="PASSED", cached=False, **ident):
        outputs = []
        if xml is not None:
            uri = "file://" + self._file(xml).replace(" ", "%20")
            outputs = [{"name": "test.log", "uri": "file:///x"}, {"name": "test.xml", "uri": uri}]
        self.events.append({
            "id": {"testResult": {"label": label, "run": 1, "shard": 1, "attempt": 1, **ident}},
            "testResult": {"status": status, "cachedLocally": cached, "testActionOutput": outputs},
        })

    def add_test(self, label, xml, **kwargs):
        self.configured(label)
        self.completed(label, completed={"success": True})
        self.result(label, xml, **kwargs)

    def count(self, status=0):
        return count_tests.count_run(iter(self.events), status)


class CountRunTest(CountTest):
    def test_googletest_cases(self):
        self.add_test("//core:ring_test", GTEST, status="FAILED")
        tally = self.count(status=3)
        self.assertEqual(tally.line(), "1 passed, 1 failed, 2 skipped")
        self.assertEqual(tally.failed, [("//core:ring_test Ring.Breaks", "ring_test.cc:7 Value of: false")])
        self.assertEqual(tally.skipped, [
            ("//core:ring_test Ring.Waits", "no futex here"),
            ("//core:ring_test Ring.DISABLED_Later", "disabled in the source"),
        ])

    def test_cached_result_counts(self):
        self.add_test("//a", PASSING, cached=True)
        self.assertEqual(self.count().line(), "2 passed, 0 failed, 0 skipped")

    def test_crash_and_timeout_are_one_failure(self):
        self.add_test("//a", CRASH, status="FAILED")
        self.add_test("//b", CRASH, status="TIMEOUT")
        self.assertEqual(self.count(3).failed, [
            ("//a core/ring_test", "exited with error code 134"),
            ("//b core/ring_test", "TIMEOUT, exited with error code 134"),
        ])

    def test_timeout_without_xml(self):
        self.add_test("//a", None, status="TIMEOUT")
        tally = self.count(3)
        self.assertEqual(tally.line(), "0 passed, 1 failed, 0 skipped")
        self.assertIn("TIMEOUT", tally.failed[0][1])

    def test_broken_xml(self):
        self.add_test("//a", PASSING[:-20])
        self.assertEqual(len(self.count().failed), 1)

    def test_failure_outside_of_the_cases(self):
        self.add_test("//a", PASSING, status="FAILED")
        self.assertEqual(self.count(3).line(), "2 passed, 1 failed, 0 skipped")

    def test_shards_and_runs_add_up(self):
        self.add_test("//a", PASSING)
        self.result("//a", PASSING, shard=2)
        self.result("//a", PASSING, run=2)
        # More shards than cases.
        self.result("//a", EMPTY, shard=3)
        self.assertEqual(self.count().line(), "6 passed, 0 failed, 0 skipped")

    def test_last_attempt_decides(self):
        self.add_test("//a", CRASH, status="FAILED")
        self.result("//a", PASSING, attempt=2)
        self.assertEqual(self.count().line(), "2 passed, 0 failed, 0 skipped")

    def test_target_without_cases(self):
        self.add_test("//a", EMPTY)
        self.assertEqual(self.count().failed, [("//a", "holds no test case")])

    def test_not_built(self):
        self.configured("//a")
        self.completed("//a")
        self.configured("//lib", size=None)
        self.completed("//lib", aborted={"reason": "ANALYSIS_FAILURE", "description": "no such x"})
        self.assertEqual(self.count(1).failed, [("//a", "was not built"), ("//lib", "no such x")])

    def test_incompatible_target_is_no_failure(self):
        self.completed("//cuda", aborted={"reason": "SKIPPED"})
        self.add_test("//a", PASSING)
        self.assertEqual(self.count().line(), "2 passed, 0 failed, 0 skipped")

    def test_library_is_no_case(self):
        self.configured("//lib", size=None)
        self.completed("//lib", completed={"success": True})
        self.add_test("//a", PASSING)
        self.assertEqual(self.count().line(), "2 passed, 0 failed, 0 skipped")

    def test_interrupted_before_a_test_ran(self):
        self.add_test("//a", PASSING)
        self.configured("//b")
        self.completed("//b", completed={"success": True})
        self.assertEqual(self.count(8).failed, [("//b", "did not run")])

    def test_bazel_failed_or_ran_nothing(self):
        self.assertEqual(self.count(1).failed, [("the run", "exit status 1")])
        self.assertEqual(self.count(0).failed, [("the run", "ran no test case")])


class MainTest(CountTest):
    def main(self, *runs):
        arguments = []
        for name, status, text in runs:
            arguments.append("%s=%d:%s" % (name, status, self._file(text)))
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            status = count_tests.main(arguments)
        return status, output.getvalue().splitlines()

    def text(self):
        text = "".join(json.dumps(event) + "\n" for event in self.events)
        self.events = []
        return text

    def test_sums_runs(self):
        self.add_test("//a", PASSING)
        first = self.text()
        self.add_test("//a", GTEST, status="FAILED")
        status, lines = self.main(("default", 0, first), ("tsan", 3, self.text()))
        self.assertEqual(status, 1)
        self.assertEqual(lines[-1], "3 passed, 1 failed, 2 skipped")
        self.assertIn("SKIPPED [tsan] //a Ring.Waits: no futex here", lines)
        self.assertIn("FAILED [tsan] //a Ring.Breaks: ring_test.cc:7 Value of: false", lines)

    def test_success(self):
        self.add_test("//a", PASSING)
        self.assertEqual(self.main(("default", 0, self.text()))[0], 0)

    def test_half_a_line_at_the_end(self):
        self.add_test("//a", PASSING)
        status, lines = self.main(("default", 37, self.text() + '{"id": {"targ'))
        self.assertEqual((status, lines[-1]), (1, "2 passed, 1 failed, 0 skipped"))

    def test_no_events_at_all(self):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            status = count_tests.main(["default=1:/nonexistent"])
        self.assertEqual(status, 1)
        self.assertEqual(output.getvalue().splitlines()[-1], "0 passed, 1 failed, 0 skipped")

    def test_no_runs(self):
        status, lines = self.main()
        self.assertEqual((status, lines[-1]), (1, "0 passed, 0 failed, 0 skipped"))

    def lines(self, *arguments):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            status = count_tests.main(list(arguments))
        return status, output.getvalue().splitlines()

    def test_a_command_is_one_case(self):
        self.assertEqual(self.lines("format=0@4"), (0, [
            "[format] 1 passed, 0 failed, 0 skipped; 4 s",
            "all phases: 4 s",
            "1 passed, 0 failed, 0 skipped",
        ]))
        self.assertEqual(self.lines("format=0", "lint=123"), (1, [
            "FAILED [lint] lint: exit status 123",
            "[format] 1 passed, 0 failed, 0 skipped",
            "[lint] 0 passed, 1 failed, 0 skipped",
            "1 passed, 1 failed, 0 skipped",
        ]))

    def test_times_stand_before_the_count_and_add_up(self):
        self.add_test("//a", PASSING)
        run = "default=0@3725:" + self._file(self.text())
        self.add_test("//a", SKIPPING)
        self.assertEqual(self.lines("setup@2", run, "tsan=0@59:" + self._file(self.text()))[1], [
            "SKIPPED [tsan] //a S.A: why",
            "[setup] 2 s",
            "[default] 2 passed, 0 failed, 0 skipped; 62 min 05 s",
            "[tsan] 0 passed, 0 failed, 1 skipped; 59 s",
            "all phases: 63 min 06 s",
            "2 passed, 0 failed, 1 skipped",
        ])

    def test_time_alone_is_no_success(self):
        self.assertEqual(self.lines("setup@2"),
                         (1, ["[setup] 2 s", "all phases: 2 s", "0 passed, 0 failed, 0 skipped"]))

    def test_what_is_no_phase_is_refused(self):
        for argument in ("", "=0", "default=x:/dev/null", "default@1:/dev/null", "default=0@:f"):
            with self.assertRaises(SystemExit):
                count_tests.main([argument])

    def test_only_skips_is_not_success(self):
        self.add_test("//a", SKIPPING)
        self.assertEqual(self.main(("default", 0, self.text()))[0], 1)


if __name__ == "__main__":
    unittest.main()
