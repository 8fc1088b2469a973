#!/bin/bash
# Runs a suite briefly: it fails when a result is wrong or a plot is missing; how long anything took
# does not matter.
#
#   suite_smoke_test.sh CHORUS_BENCH CHORUSD ATTACK MOST_MIB SUITE [PLOT...]
set -euo pipefail
readonly bench="$1" daemon="$2" attack="$3" most_mib="$4" suite="$5"
shift 5

plots="$TEST_TMPDIR/plots"
"$bench" --smoke --ranks=2,4 --daemon="$daemon" --attack="$attack" --most_mib="$most_mib" --plot="$plots" "$suite"
expected="$(printf '%s.svg\n' "$@")"
[[ $# -gt 0 ]] || expected=
if [[ "$(ls "$plots")" != "$expected" ]]; then
  echo "expected the plots $expected, got" && ls "$plots"
  exit 1
fi
for plot in "$@"; do
  python3 - "$plots/$plot.svg" <<'PYTHON'
import sys
import xml.etree.ElementTree as tree

svg = "{http://www.w3.org/2000/svg}"
curves = tree.parse(sys.argv[1]).getroot().findall(svg + "polyline")
without = [curve.find(svg + "title").text for curve in curves if not curve.get("points")]
if not curves or without:
    sys.exit("%s: %d curves, of which have no point: %s" % (sys.argv[1], len(curves), without))
PYTHON
done
