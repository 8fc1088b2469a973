"""Tests of type_names.py."""

import contextlib
import io
import json
import unittest
from unittest import mock

import type_names


def tag(name, path, **scope):
    return json.dumps({"name": name, "path": path, "kind": "struct", **scope})


def of_namespace(scope):
    return {"scope": scope, "scopeKind": "namespace"}


class TypeNamesTest(unittest.TestCase):
    def check(self, *tags):
        """The status, and what is printed where ctags says this."""
        output = io.StringIO()
        ran = mock.Mock(stdout="\n".join(tags))
        with mock.patch("subprocess.run", return_value=ran), contextlib.redirect_stdout(output):
            return type_names.main(["a.h"]), output.getvalue()

    def test_two_of_one_namespace_are_told(self):
        chorus = of_namespace("chorus")
        self.assertEqual(
            self.check(tag("Node", "b.h", **chorus), tag("Node", "a.h", **chorus)),
            (1, "chorus::Node is a type of each of a.h, b.h\n"))
        self.assertEqual(
            self.check(tag("Node", "a.h"), tag("Node", "b.cc")),
            (1, "Node is a type of each of a.h, b.cc\n"))

    def test_what_no_other_file_sees_may_have_any_name(self):
        self.assertEqual(
            self.check(
                tag("Node", "a.h", **of_namespace("chorus")),
                tag("Node", "b.h", **of_namespace("chorus::node")),
                tag("Node", "a.cc", **of_namespace("chorus::__anon01")),
                tag("Node", "b.cc", **of_namespace("chorus::__anon01")),
                tag("Node", "c.h", scope="chorus::Graph", scopeKind="struct"),
                tag("Node", "d.h", scope="chorus::Graph", scopeKind="struct")),
            (0, ""))

    def test_no_type_at_all_is_no_success(self):
        self.assertEqual(self.check(), (2, "type_names: no type found\n"))


if __name__ == "__main__":
    unittest.main()
