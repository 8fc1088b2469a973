"""Tests of lint_files.py, with a stub for clang-tidy that finds whatever says FINDING."""

import contextlib
import io
import json
import os
import tempfile
import unittest

import lint_files

STUB = """#!/bin/bash
[[ "$1" != --version ]] || { echo "version ${VERSION:-1}"; exit; }
echo "$*" >>"$(dirname "$0")/asked"
for argument in "$@"; do
  [[ "$argument" != --* ]] || continue
  case "$(cat "$argument")" in
    *CRASH*) echo "no such flag" >&2; exit 1 ;;
    *FINDING*)
      echo "$PWD/$argument:1:1: error: found [a-check,-warnings-as-errors]"
      echo "  the line"
      echo "./core/all.h:2:1: error: in a header [a-check,-warnings-as-errors]"
      exit 1 ;;
  esac
  break
done
"""


class FlagsTest(unittest.TestCase):
    def test_what_the_code_means_is_kept_and_the_last_standard(self):
        self.assertEqual(lint_files.compile_flags([
            "/usr/bin/gcc", "-std=c++0x", "-fPIC", "-DNAME=\"a b\"", "-iquote", ".", "-O2", "-mf16c",
            "-isystem", "x", "-Iy", "-Werror", "-std=c++17", "-Wall", "-c", "a.cc", "-o", "a.o",
        ], "/x"), ["-std=c++17", "-DNAME=\"a b\"", "-iquote", ".", "-mf16c", "-isystem", "x", "-I", "y"])

    def test_what_rules_have_made_is_found_from_anywhere(self):
        self.assertEqual(
            lint_files.compile_flags(["-iquote", "bazel-out/bin", "-Iexternal/system"], "/x/execroot/chorus"),
            ["-iquote", "/x/execroot/chorus/bazel-out/bin",
             "-I", "/x/execroot/chorus/../../external/system"])

    def test_the_first_of_several_actions_counts(self):
        actions = {"actions": [
            {"arguments": ["gcc", "-DFIRST", "-c", "a.cc"]}, {"arguments": ["gcc", "-c", "a.cc"]}, {}]}
        self.assertEqual(lint_files.read_commands(actions, "/x"), {"a.cc": ["-DFIRST"]})

    def test_headers_are_ours_and_not_made_by_protoc(self):
        out = "/x/execroot/chorus/bazel-out/k8-fastbuild/bin/"
        for path in ("./core/base/error.h", "core/base/error.h",
                     out + "client/_virtual_includes/tensor/chorus/tensor.h"):
            self.assertRegex(path, lint_files.HEADERS)
        for path in ("/usr/include/core/x.h", out + "external/system/core/x.h",
                     out + "proto/_virtual_includes/protos/chorus/v1/types.pb.h"):
            self.assertNotRegex(path, lint_files.HEADERS)


class LintTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lint files ")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.addCleanup(os.environ.pop, "VERSION", None)
        self.write("clang-tidy", STUB)
        os.chmod(self.path("clang-tidy"), 0o755)
        self.write("checks", "Checks: -*")
        self.write("core/all.h", "#include <missing>\n")
        self.write("core/a.cc", '#include "core/all.h"\n')
        self.write("core/b.cc", '  #  include "all.h"\n')
        self.flags = ["-iquote", "."]

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)

    def lint(self, *sources):
        self.write("asked", "")
        self.write("actions", json.dumps({"actions": [
            {"arguments": ["gcc"] + self.flags + ["-c", source]} for source in ("core/a.cc", "core/b.cc")]}))
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            status = lint_files.main([
                "--actions=" + self.path("actions"), "--execution_root=/x", "--root=" + self.folder,
                "--program=" + self.path("clang-tidy"), "--config=" + self.path("checks"),
                "--cache=" + self.path("cache")] + list(sources))
        with open(self.path("asked"), encoding="utf-8") as file:
            self.asked = len(file.readlines())
        return status, output.getvalue().splitlines()

    def test_clean_files_are_remembered(self):
        clean = (0, ["lint: 2 clean, 0 with findings, 0 not compiled here"])
        self.assertEqual((self.lint("core/a.cc", "core/b.cc"), self.asked), (clean, 2))
        self.assertEqual((self.lint("core/a.cc", "core/b.cc"), self.asked), (clean, 0))

    def test_whatever_a_result_depends_on_is_looked_at_again(self):
        self.lint("core/a.cc", "core/b.cc")
        changes = [
            (2, lambda: self.write("core/all.h", "// another\n")),
            (1, lambda: self.write("core/b.cc", "// another\n")),
            (2, lambda: self.write("checks", "Checks: -*,more")),
            (2, lambda: self.flags.append("-DMORE")),
            (2, lambda: os.environ.update(VERSION="2")),
        ]
        for asked, change in changes:
            change()
            self.lint("core/a.cc", "core/b.cc")
            self.assertEqual(self.asked, asked)

    def test_findings_are_told_once_and_every_time(self):
        self.write("core/a.cc", "FINDING")
        self.write("core/b.cc", "FINDING")
        for _ in range(2):
            status, lines = self.lint("core/a.cc", "core/b.cc")
            self.assertEqual(status, 1)
            self.assertEqual(sorted(lines[:-1]), [
                "  the line", "  the line",
                "./core/all.h:2:1: error: in a header [a-check,-warnings-as-errors]",
                "core/a.cc:1:1: error: found [a-check,-warnings-as-errors]",
                "core/b.cc:1:1: error: found [a-check,-warnings-as-errors]",
            ])
            self.assertEqual(lines[-1], "lint: 0 clean, 2 with findings, 0 not compiled here")

    def test_a_crash_is_a_finding(self):
        self.write("core/a.cc", "CRASH")
        self.assertEqual(self.lint("core/a.cc", "core/b.cc"), (1, [
            "core/a.cc: clang-tidy ended with status 1: no such flag",
            "lint: 1 clean, 1 with findings, 0 not compiled here",
        ]))

    def test_what_no_target_compiles_is_said(self):
        self.assertEqual(self.lint("core/a.cc", "other/main.cc"), (0, [
            "not compiled here: other/main.cc",
            "lint: 1 clean, 0 with findings, 1 not compiled here",
        ]))
        self.assertEqual(self.lint("other/main.cc")[0], 1)


if __name__ == "__main__":
    unittest.main()
