"""What a trainer includes shows no more of core/ than a trainer has to read."""

import glob
import re
import unittest

# Errors and their reasons, elements, reductions, lines of calls.
SHOWN = {
    "core/base/error.h",
    "core/collective/call_sites.h",
    "core/graph/reduction_kind.h",
    "core/tensor/half.h",
    "core/tensor/type.h",
}


class PublicHeadersTest(unittest.TestCase):
    def test_includes_of_the_tree_are_public_or_shown(self):
        # The targets put nothing else here.
        headers = sorted(glob.glob("client/**/*.h", recursive=True))
        for expected in ["client/chorus.h", "client/user_memory.h", "client/nn/nn.h", "client/data/data.h"]:
            self.assertIn(expected, headers)
        public = {"chorus/" + header[len("client/"):] for header in headers}
        refused = []
        shown = set()
        for header in headers:
            with open(header, encoding="utf-8") as text:
                for included in re.findall(r'^#include "([^"]+)"', text.read(), re.MULTILINE):
                    if included in SHOWN:
                        shown.add(included)
                    elif included not in public and not included.startswith("absl/"):
                        refused.append("%s includes %s" % (header, included))
        self.assertEqual(refused, [])
        self.assertEqual(shown, SHOWN)


if __name__ == "__main__":
    unittest.main()
