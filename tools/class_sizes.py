#!/usr/bin/python3
"""Looks whether classes have more functions than a reader keeps in mind; see tools/lint.

    class_sizes.py FILE...

A class's functions are its names with how many arguments they take, without constructors,
destructors and assignments (docs/architecture.md has who may have more, and why). ctags finds them.
"""

import collections
import sys

import ctags

MOST = 40
MAY_HAVE_MORE = ("chorus::Sequencer", "chorus::node::LocalNode")


def arguments(signature):
    """How many parameters a signature like "(int a, std::pair<A, B> b) const" has."""
    inside = signature[1 : signature.rindex(")")].strip()
    if inside in ("", "void"):
        return 0
    depth = 0
    commas = 0
    for character in inside:
        depth += (character in "(<[{") - (character in ")>]}")
        commas += character == "," and depth == 0
    return commas + 1


def functions(tags):
    """By class, what ctags' tags say it has."""
    of = collections.defaultdict(set)
    for tag in tags:
        if tag.get("scopeKind") not in ("class", "struct"):
            continue
        name = tag["name"]
        if name in (tag["scope"].split("::")[-1], "operator =") or name.startswith("~"):
            continue
        of[tag["scope"]].add((name, arguments(tag.get("signature", "()"))))
    return of


def main(files):
    of = functions(ctags.tags(files, "pf", "+SsZ"))
    if not of:
        print("class_sizes: no class found")
        return 2
    status = 0
    for name in sorted(of):
        if len(of[name]) > MOST and name not in MAY_HAVE_MORE:
            print("%s has %d functions, more than %d" % (name, len(of[name]), MOST))
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
