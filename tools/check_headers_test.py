"""Tests of check_headers.py."""

import contextlib
import io
import os
import tempfile
import unittest

import check_headers

WHOLE = """// What it is.
//
// Threads: any. Ownership: a pool owns
// its threads. Errors:
//   said at each function.
#ifndef A_H_
"""


class CheckHeadersTest(unittest.TestCase):
    def check(self, **texts):
        """The status, and what is printed with a header of each text; of NAME_cc it is NAME.cc's."""
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for name, text in texts.items():
                name = name[:-3] + ".cc" if name.endswith("_cc") else name + ".h"
                paths.append(os.path.join(folder, name))
                with open(paths[-1], "w", encoding="utf-8") as file:
                    file.write(text)
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                status = check_headers.main(paths)
            return status, output.getvalue().replace(folder + "/", "").splitlines()

    def test_a_header_that_says_all_is_passed(self):
        self.assertEqual(self.check(a=WHOLE), (0, []))

    def test_each_word_is_missed_by_itself_and_told_with_its_file(self):
        for word in ("Threads", "Ownership", "Errors"):
            self.assertEqual(
                self.check(a=WHOLE, b=WHOLE.replace(word + ":", word)),
                (1, ["b.h: its opening comment does not say " + word]))

    def test_other_words_for_them_are_no_substitute(self):
        self.assertEqual(
            self.check(a="// Threads and errors: b.h. Ownership, errors: none. Failure: none.\n"),
            (1, ["a.h: its opening comment does not say Threads, Ownership, Errors"]))

    def test_only_the_opening_comment_counts(self):
        nothing = (1, ["a.h: its opening comment does not say Threads, Ownership, Errors"])
        self.assertEqual(self.check(a="#ifndef A_H_\n" + WHOLE), nothing)
        self.assertEqual(self.check(a="\n" + WHOLE), nothing)
        self.assertEqual(self.check(a="// What it is.\n\n" + WHOLE), nothing)
        self.assertEqual(self.check(a=""), nothing)

    def test_all_headers_are_looked_at(self):
        self.assertEqual(self.check(a="", b=WHOLE, c=WHOLE.replace("Errors:", "Failure:")), (1, [
            "a.h: its opening comment does not say Threads, Ownership, Errors",
            "c.h: its opening comment does not say Errors",
        ]))
        self.assertEqual(self.check(), (0, []))

    def test_a_source_has_a_header_or_a_main(self):
        self.assertEqual(self.check(a=WHOLE, a_cc="int Two() { return 2; }\n",
                                    b_cc="#include <a.h>\n\nint main(int, char**) {}\n"), (0, []))
        self.assertEqual(
            self.check(a=WHOLE, c_cc="// Here int main() is only named.\nint domain();\n"),
            (1, ["c.cc: there is no c.h beside it, nor a main in it"]))


if __name__ == "__main__":
    unittest.main()
