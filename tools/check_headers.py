#!/usr/bin/python3
"""Looks whether headers say in their opening comment what each has to say; see tools/format --check.

    check_headers.py HEADER...

The opening comment is the first block of lines that begin with //, at the top of the file. It says
`Threads: ...`, `Ownership: ...` and `Errors: ...`: whether that is true, readers see. The headers of
tests/ and benchmarks/ are left out by the caller: their own programs alone include them.
"""

import itertools
import sys

WORDS = ("Threads:", "Ownership:", "Errors:")


def lacking(text):
    """Those of the words that the opening comment of a header with this text does not have."""
    comment = itertools.takewhile(lambda line: line.startswith("//"), text.splitlines())
    said = {word for line in comment for word in line.split()}
    return [word for word in WORDS if word not in said]


def main(headers):
    status = 0
    for header in headers:
        with open(header, encoding="utf-8") as file:
            words = lacking(file.read())
        if words:
            print("%s: its opening comment does not say %s" % (
                header, ", ".join(word.rstrip(":") for word in words)))
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
