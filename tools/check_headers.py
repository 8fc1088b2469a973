#!/usr/bin/python3
"""Looks whether headers say what each has to say, and .cc files have one; see tools/format --check.

    check_headers.py FILE...

The opening comment of a header is the first block of lines that begin with //, at the top of the file.
It says `Threads: ...`, `Ownership: ...` and `Errors: ...`: whether that is true, readers see. The headers
of tests/ and benchmarks/ are left out by the caller: their own programs alone include them.

Beside a .cc stands the header of its name, unless it is a program's main. Tests, benchmarks and fuzz
targets, which have a main of a library, are left out by the caller, too.
"""

import itertools
import os
import re
import sys

WORDS = ("Threads:", "Ownership:", "Errors:")


def lacking(text):
    """Those of the words that the opening comment of a header with this text does not have."""
    comment = itertools.takewhile(lambda line: line.startswith("//"), text.splitlines())
    said = {word for line in comment for word in line.split()}
    return [word for word in WORDS if word not in said]


def complaint(path):
    """What is wrong with the file; None: nothing."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if path.endswith(".h"):
        words = lacking(text)
        said = ", ".join(word.rstrip(":") for word in words)
        return "its opening comment does not say " + said if words else None
    header = os.path.splitext(path)[0] + ".h"
    if os.path.exists(header) or re.search(r"^int main\(", text, re.MULTILINE):
        return None
    return "there is no %s beside it, nor a main in it" % os.path.basename(header)


def main(paths):
    status = 0
    for path in paths:
        wrong = complaint(path)
        if wrong:
            print("%s: %s" % (path, wrong))
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
