#!/usr/bin/python3
"""Looks whether what may use a target of Bazel's does; see tools/lint.

    bazel query --output=xml //... | visibility.py

Each package that `visibility` names (`//p:__pkg__`, `//p:__subpackages__`) uses the target; of what a
macro makes, one. What is open to all is not looked at.
"""

import collections
import sys
from xml.etree import ElementTree


def package(label):
    return label.split(":")[0]


def uses(user, allowed):
    """Whether a package is one that an entry of `visibility` names."""
    names, kind = allowed.split(":")
    if kind == "__subpackages__":
        return names == "//" or user == names or user.startswith(names + "/")
    return user == names


def unused(query):
    """What is open to a package that does not use it: pairs of a target, or a macro's name, and it."""
    users = collections.defaultdict(set)  # of each target, the packages that use it
    open_to = collections.defaultdict(set)  # of each target as it was written, the entries
    made = collections.defaultdict(set)  # of each target as it was written, those of Bazel
    for rule in ElementTree.fromstring(query).iter("rule"):
        name = rule.get("name")
        for used in rule.iter("rule-input"):
            users[used.get("name")].add(package(name))
        written = name
        for attribute in rule.iter("string"):
            if attribute.get("name") == "generator_name":
                written = package(name) + ":" + attribute.get("value")
        made[written].add(name)
        for attribute in rule.iter("list"):
            if attribute.get("name") == "visibility":
                open_to[written].update(entry.get("value") for entry in attribute)
    if not any(open_to.values()):
        raise ValueError("no target has a visibility")
    return [
        (written, entry)
        for written, entries in sorted(open_to.items())
        for entry in sorted(entries)
        if not entry.startswith("//visibility:")
        and not any(
            uses(user, entry) and user != package(written)
            for name in made[written] for user in users[name])
    ]


def main():
    found = unused(sys.stdin.read())
    for written, entry in found:
        print("%s is visible to %s, where nothing uses it" % (written, entry))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
