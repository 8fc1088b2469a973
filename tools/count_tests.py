#!/usr/bin/python3
"""Counts test cases from the build event files of `bazel test`.

    count_tests.py PHASE...

A PHASE is one of

    NAME=STATUS@SECONDS:FILE   a run of Bazel: a name to print, its exit status, how long it took and
                               what it wrote for --build_event_json_file
    NAME=STATUS@SECONDS        another command, which is one case: it passed if its exit status is 0
    NAME@SECONDS               what has only taken time

and may do without its @SECONDS. Counting from those files, and not from bazel-testlogs, leaves out
what earlier runs left behind. A case that ran in two configurations counts twice.

Prints each skip with its reason and each failure, what each phase counts and took, and as last line
`N passed, M failed, K skipped`. Exits with 1 if anything failed or nothing passed.

A failure is also: a target that was not built, a test that did not run or whose test.xml cannot be
read, a test that holds no case at all, one that failed outside of its cases (a leak at exit, say),
and a run of Bazel that failed without any of these or ran no case.
"""

import collections
import json
import os
import re
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree


class Tally:
    """Names of what passed, and (name, reason) of what failed or was skipped."""

    def __init__(self):
        self.passed = []
        self.failed = []
        self.skipped = []

    def line(self):
        return "%d passed, %d failed, %d skipped" % (
            len(self.passed), len(self.failed), len(self.skipped))

    def add(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


def read_events(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    # A Bazel that was killed leaves half a line at the end.
                    return
    except FileNotFoundError:
        return


def _brief(text):
    """The text on one line, cut to a length that fits a list."""
    return " ".join((text or "").split())[:200]


def _skip_reason(element):
    # GoogleTest puts file:line before the text of GTEST_SKIP().
    text = element.get("message") or element.text or ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1:
        lines = lines[1:]
    return " ".join(lines) or "no reason given"


def count_xml(label, outcome, path, tally):
    """Adds the cases of one test.xml. Returns (number of cases, number of failed cases)."""
    cases = 0
    failures = 0
    for case in ElementTree.parse(path).iter("testcase"):
        cases += 1
        suite = case.get("classname")
        name = "%s %s" % (label, "%s.%s" % (suite, case.get("name")) if suite else case.get("name"))
        bad = case.find("failure")
        if bad is None:
            bad = case.find("error")
        skipped = case.find("skipped")
        if bad is not None:
            failures += 1
            reason = _brief(bad.get("message") or bad.text)
            tally.failed.append((name, "TIMEOUT, " + reason if outcome == "TIMEOUT" else reason))
        elif skipped is not None:
            tally.skipped.append((name, _skip_reason(skipped)))
        elif case.get("status") == "notrun":
            tally.skipped.append((name, "disabled in the source"))
        else:
            tally.passed.append(name)
    return cases, failures


def _xml_path(result):
    for output in result.get("testActionOutput", []):
        if output.get("name") == "test.xml":
            return urllib.parse.unquote(urllib.parse.urlparse(output.get("uri", "")).path)
    return ""


def count_run(events, status):
    """The tally of one run of Bazel."""
    tally = Tally()
    tests = set()
    built = set()
    results = {}
    for event in events:
        ident = event.get("id", {})
        if "targetConfigured" in ident:
            if event.get("configured", {}).get("testSize", "UNKNOWN") != "UNKNOWN":
                tests.add(ident["targetConfigured"]["label"])
        elif "targetCompleted" in ident:
            label = ident["targetCompleted"]["label"]
            if event.get("completed", {}).get("success"):
                built.add(label)
            elif event.get("aborted", {}).get("reason") != "SKIPPED":
                reason = event.get("aborted", {}).get("description") or "was not built"
                tally.failed.append((label, _brief(reason)))
        elif "testResult" in ident and "testResult" in event:
            key = ident["testResult"]
            # Of several attempts the last one decides.
            results[(key["label"], key.get("run", 1), key.get("shard", 1))] = event["testResult"]

    cases_of = collections.Counter()
    failed_labels = set()
    for (label, run, shard), result in results.items():
        outcome = result.get("status", "NO_STATUS")
        try:
            cases, failures = count_xml(label, outcome, _xml_path(result), tally)
        except (OSError, ElementTree.ParseError) as error:
            tally.failed.append((label, "%s, and its test.xml cannot be read: %s" % (outcome, error)))
            failed_labels.add(label)
            continue
        cases_of[label] += cases
        if outcome not in ("PASSED", "FLAKY") and failures == 0:
            tally.failed.append((label, "%s outside of its cases" % outcome))
            failed_labels.add(label)

    with_result = {label for label, _, _ in results}
    for label in sorted(with_result - failed_labels):
        if cases_of[label] == 0:
            tally.failed.append((label, "holds no test case"))
    for label in sorted((tests & built) - with_result):
        tally.failed.append((label, "did not run"))
    if not tally.failed:
        if status != 0:
            tally.failed.append(("the run", "exit status %d" % status))
        elif not tally.passed and not tally.skipped:
            tally.failed.append(("the run", "ran no test case"))
    return tally


def count_command(name, status):
    """The tally of a command that is one case."""
    tally = Tally()
    if status == 0:
        tally.passed.append(name)
    else:
        tally.failed.append((name, "exit status %d" % status))
    return tally


_PHASE = re.compile(r"(?P<name>[^=@:]+)(=(?P<status>\d+))?(@(?P<seconds>\d+))?(:(?P<file>.*))?$")


def duration(seconds):
    """Of 125 seconds `2 min 05 s`."""
    minutes, seconds = divmod(seconds, 60)
    return "%d min %02d s" % (minutes, seconds) if minutes else "%d s" % seconds


def main(arguments):
    total = Tally()
    phases = []
    total_seconds = 0
    for argument in arguments:
        phase = _PHASE.match(argument)
        if phase is None or (phase["file"] is not None and phase["status"] is None):
            sys.exit("count_tests.py: no phase: " + argument)
        name = phase["name"]
        said = []
        if phase["status"] is not None:
            if phase["file"] is None:
                tally = count_command(name, int(phase["status"]))
            else:
                tally = count_run(read_events(phase["file"]), int(phase["status"]))
            for case, reason in tally.skipped:
                print("SKIPPED [%s] %s: %s" % (name, case, reason))
            for case, reason in tally.failed:
                print("FAILED [%s] %s: %s" % (name, case, reason))
            said.append(tally.line())
            total.add(tally)
        if phase["seconds"] is not None:
            said.append(duration(int(phase["seconds"])))
            total_seconds += int(phase["seconds"])
        phases.append("[%s] %s" % (name, "; ".join(said)))
    for line in phases:
        print(line)
    if total_seconds:
        print("all phases: " + duration(total_seconds))
    print(total.line())
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
