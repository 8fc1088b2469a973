#!/usr/bin/python3
"""Runs the benchmarks of two builds at once, each stopped while the other runs, and compares them.

    bench_turns.py [--times=N] [--slice=SECONDS] BEFORE AFTER ARGUMENT...

BEFORE and AFTER are directories as bazel-bin, with server/chorusd and benchmarks/chorus_bench; the
arguments are chorus_bench's. A machine whose speed changes is so as fast for both. Samples that a
stop falls into are long, which medians of many do not show; those of few (steps of minutes) do.

Prints for each suite, what it measures, ranks and contender how AFTER's times relate to BEFORE's:
geometric means of the ratios over all sizes and runs, of the median of rounds, of the least round
and of p99. Contenders that are the same program in both (hand-off, Open MPI) say how much of that is
the machine's.
"""

import argparse
import collections
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time

# In the environment of all that a build has started.
MARK = "CHORUS_BENCH_TURN"


class Build:
    """One of the two: a program and all that it starts, which is stopped and goes on together."""

    def __init__(self, name, command, log):
        value = "%s-%d" % (name, os.getpid())
        self._mark = ("%s=%s" % (MARK, value)).encode()
        self._main = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ, **{MARK: value}))

    def processes(self):
        """Process ids and states (T: stopped), but of those that have ended."""
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                with open("/proc/%s/environ" % entry, "rb") as environ:
                    if self._mark not in environ.read().split(b"\0"):
                        continue
                with open("/proc/%s/stat" % entry) as stat:
                    found[int(entry)] = stat.read().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it has ended, or is somebody else's
        return found

    def _signal(self, number):
        for process in self.processes():
            try:
                os.kill(process, number)
            except ProcessLookupError:
                pass

    def stop(self):
        """Returns when all are stopped; one that was just being started may have been missed."""
        while any(state != "T" for state in self.processes().values()):
            self._signal(signal.SIGSTOP)
            time.sleep(0.001)

    def go_on(self):
        self._signal(signal.SIGCONT)

    def end(self):
        self._signal(signal.SIGTERM)
        self.go_on()
        return self._main.wait()

    def wait(self, seconds):
        """The exit status; None: it runs on."""
        try:
            return self._main.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


def take_turns(builds, slice_seconds):
    """Runs them until all have ended, or one has failed. Returns their exit statuses."""
    statuses = [None for _ in builds]
    try:
        for build in builds[1:]:
            build.stop()
        while None in statuses and not any(statuses):
            running = [i for i, status in enumerate(statuses) if status is None]
            for i in running:
                builds[i].go_on()
                statuses[i] = builds[i].wait(slice_seconds)
                if statuses[i] is None and len(running) > 1:
                    builds[i].stop()
        return statuses
    finally:
        for build, status in zip(builds, statuses):
            if status is None:
                build.end()


def figures(results):
    """By suite, what, ranks, contender and bytes: a contender's figures."""
    found = collections.OrderedDict()
    for case in results["results"]:
        for contender in case["contenders"]:
            if "p50_ns" in contender:
                key = (case["benchmark"], case["what"], case["ranks"], contender["name"])
                found[key + (case["bytes"],)] = contender
    return found


def mean(ratios):
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def compare(runs):
    """Rows of text, of what each run had: the results before and after."""
    ratios = collections.OrderedDict()
    for before, after in runs:
        before, after = figures(before), figures(after)
        for key, was in before.items():
            if key in after:
                row = ratios.setdefault(key[:-1], [])
                row.append([after[key][figure] / was[figure]
                            for figure in ("p50_ns", "p50_least_ns", "p99_ns")])
    rows = [("suite", "what", "ranks", "contender", "of", "p50", "least", "p99")]
    for (suite, what, ranks, contender), of in ratios.items():
        means = ["%.2f" % mean(column) for column in zip(*of)]
        rows.append((suite, what, str(ranks), contender, str(len(of)), *means))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in rows]


def run_once(directories, arguments, slice_seconds):
    """The results of both."""
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        files = [os.path.join(scratch, name) for name in ("before", "after")]
        logs = [stack.enter_context(open(file + ".log", "w+")) for file in files]
        builds = [
            Build(os.path.basename(file), [
                os.path.join(directory, "benchmarks/chorus_bench"),
                "--daemon=" + os.path.join(directory, "server/chorusd"),
                "--json=%s.json" % file, *arguments], log)
            for file, directory, log in zip(files, directories, logs)]
        statuses = take_turns(builds, slice_seconds)
        for directory, log, status in zip(directories, logs, statuses):
            if status:
                log.seek(0)
                sys.exit("%sbench_turns: chorus_bench of %s ended with %d" % (
                    log.read(), directory, status))
        results = []
        for file in files:
            with open(file + ".json", encoding="utf-8") as written:
                results.append(json.load(written))
        return results


def main(arguments):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--slice", type=float, default=1)
    parser.add_argument("before")
    parser.add_argument("after")
    options, rest = parser.parse_known_args(arguments)
    runs = []
    for time_of in range(options.times):
        print("bench: both, %d of %d times" % (time_of + 1, options.times), flush=True)
        runs.append(run_once([options.before, options.after], rest, options.slice))
    print("after over before:")
    print("\n".join(compare(runs)))


if __name__ == "__main__":
    main(sys.argv[1:])
