"""Tests of class_sizes.py."""

import contextlib
import io
import json
import unittest
from unittest import mock

import class_sizes


def tag(name, signature="()", scope="chorus::Node", kind="class"):
    return {"name": name, "signature": signature, "scope": scope, "scopeKind": kind}


class ClassSizesTest(unittest.TestCase):
    def test_arguments_are_counted_between_their_commas(self):
        for signature, count in (
                ("()", 0), ("(void)", 0), ("() const", 0), ("(int a)", 1), ("(int a,int b)", 2),
                ("(std::map<int,int> a,std::function<void (int,int)> b) const", 2),
                ("(int a = f(1,2),int b = T{1,2})", 2)):
            self.assertEqual(class_sizes.arguments(signature), count, signature)

    def test_a_function_counts_once_for_each_count_of_arguments(self):
        tags = [
            tag("Add", "(int a)"), tag("Add", "(double b)"), tag("Add", "(int a,int b)"),
            tag("Size", "() const"), tag("Add", "(int a)", scope="chorus::Other"),
        ]
        of = class_sizes.functions(tags)
        self.assertEqual(of["chorus::Node"], {("Add", 1), ("Add", 2), ("Size", 0)})
        self.assertEqual(of["chorus::Other"], {("Add", 1)})

    def test_what_makes_and_ends_it_does_not_count(self):
        tags = [
            tag("Node", "(int a)"), tag("~Node"), tag("operator =", "(const Node &)"),
            tag("operator ==", "(const Node & a)"), tag("Free", scope="chorus", kind="namespace"),
        ]
        self.assertEqual(class_sizes.functions(tags), {"chorus::Node": {("operator ==", 1)}})

    def check(self, *tags):
        """The status, and what is printed where ctags says this."""
        output = io.StringIO()
        ran = mock.Mock(stdout="\n".join(json.dumps(one) for one in tags))
        with mock.patch("subprocess.run", return_value=ran), contextlib.redirect_stdout(output):
            return class_sizes.main(["node.h"]), output.getvalue()

    def test_a_class_with_one_too_many_is_told(self):
        most = [tag("F%d" % i) for i in range(class_sizes.MOST)]
        self.assertEqual(self.check(*most), (0, ""))
        self.assertEqual(
            self.check(*most, tag("G")), (1, "chorus::Node has 41 functions, more than 40\n"))

    def test_two_may_have_more(self):
        for name in class_sizes.MAY_HAVE_MORE:
            many = [tag("F%d" % i, scope=name) for i in range(100)]
            self.assertEqual(self.check(*many), (0, ""))

    def test_no_class_at_all_is_no_success(self):
        self.assertEqual(self.check(), (2, "class_sizes: no class found\n"))


if __name__ == "__main__":
    unittest.main()
