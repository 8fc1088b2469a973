#!/usr/bin/python3
"""Looks whether two types of one namespace have the same name; see tools/lint.

    type_names.py FILE...

Each is then one type to the linker, whichever of the two it takes. Types inside others and those of
namespaces without a name are not looked at: no other file sees them. ctags finds the types.
"""

import collections
import sys

import ctags


def files_of_types(tags):
    """By the name of a type with its namespace, the files that define it, by ctags' tags."""
    of = collections.defaultdict(set)
    for tag in tags:
        if tag.get("scopeKind", "namespace") != "namespace" or "__anon" in tag.get("scope", ""):
            continue
        if tag["name"].startswith("__anon"):
            continue
        scope = tag.get("scope")
        of[scope + "::" + tag["name"] if scope else tag["name"]].add(tag["path"])
    return of


def main(files):
    of = files_of_types(ctags.tags(files, "csuget", "+sZ"))
    if not of:
        print("type_names: no type found")
        return 2
    status = 0
    for name, paths in sorted(of.items()):
        if len(paths) > 1:
            print("%s is a type of each of %s" % (name, ", ".join(sorted(paths))))
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
