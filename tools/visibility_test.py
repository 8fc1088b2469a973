"""Tests of visibility.py."""

import unittest

import visibility


def rule(name, uses=(), visible=(), macro=None):
    lists = "".join('<label value="%s"/>' % entry for entry in visible)
    return '<rule name="%s">%s<list name="visibility">%s</list>%s</rule>' % (
        name, '<string name="generator_name" value="%s"/>' % macro if macro else "", lists,
        "".join('<rule-input name="%s"/>' % used for used in uses))


def unused(*rules):
    return visibility.unused("<query>%s</query>" % "".join(rules))


class VisibilityTest(unittest.TestCase):
    def test_an_entry_is_used_by_a_target_of_its_package(self):
        of = rule("//a:a", visible=["//b:__pkg__"])
        self.assertEqual(unused(of, rule("//b:b", uses=["//a:a"])), [])
        for other in (rule("//b:b"), rule("//b/c:c", uses=["//a:a"]), rule("//b:b", uses=["//a:c"])):
            self.assertEqual(unused(of, other), [("//a:a", "//b:__pkg__")])

    def test_or_by_one_of_a_package_below(self):
        of = rule("//a:a", visible=["//b:__subpackages__"])
        for user in ("//b:b", "//b/c:c"):
            self.assertEqual(unused(of, rule(user, uses=["//a:a"])), [])
        self.assertEqual(
            unused(of, rule("//bc:b", uses=["//a:a"])), [("//a:a", "//b:__subpackages__")])

    def test_a_package_needs_no_entry_for_itself(self):
        self.assertEqual(
            unused(rule("//a:a", visible=["//a:__subpackages__"]), rule("//a:b", uses=["//a:a"])),
            [("//a:a", "//a:__subpackages__")])

    def test_of_a_macros_targets_one_is_used(self):
        visible = ["//b:__pkg__"]
        made = [rule("//a:" + name, visible=visible, macro="a") for name in ("a", "a_gen")]
        self.assertEqual(unused(*made, rule("//b:b", uses=["//a:a"])), [])
        self.assertEqual(unused(*made), [("//a:a", "//b:__pkg__")])

    def test_what_is_open_to_all_or_nobody_is_not_looked_at(self):
        self.assertEqual(
            unused(rule("//a:a", visible=["//visibility:public"]),
                   rule("//a:b", visible=["//visibility:private"])),
            [])

    def test_no_visibility_at_all_is_no_success(self):
        self.assertRaises(ValueError, unused, rule("//a:a"))


if __name__ == "__main__":
    unittest.main()
