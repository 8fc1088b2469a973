#!/usr/bin/python3
"""Runs one file of unittest cases and reports each case to Bazel, not only their sum."""

import importlib.util
import os
import sys
import time
import unittest
import xml.etree.ElementTree as ElementTree


class _Result(unittest.TextTestResult):
    def __init__(self, *args):
        super().__init__(*args)
        self.suite = ElementTree.Element("testsuite", name=sys.argv[1])

    def startTest(self, test):
        super().startTest(test)
        class_name, _, name = test.id().rpartition(".")
        self._case = ElementTree.SubElement(self.suite, "testcase", classname=class_name, name=name)
        self._start = time.monotonic()

    def stopTest(self, test):
        self._case.set("time", "%.3f" % (time.monotonic() - self._start))
        super().stopTest(test)

    def _child(self, kind, message):
        ElementTree.SubElement(self._case, kind, message=message)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._child("failure", str(err[1]))

    def addError(self, test, err):
        super().addError(test, err)
        self._child("error", str(err[1]))

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err:
            self._child("failure", "%s: %s" % (subtest, err[1]))

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._child("skipped", reason)


def main():
    path = sys.argv[1]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-len(".py")], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner(resultclass=_Result, verbosity=2).run(suite)
    if "XML_OUTPUT_FILE" in os.environ:
        ElementTree.ElementTree(result.suite).write(os.environ["XML_OUTPUT_FILE"])
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
