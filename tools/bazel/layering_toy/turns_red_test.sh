#!/bin/bash
# turns_red_test.sh CHECK TARGET FILE CULPRIT: the check must fail, and name the culprit.

set -uo pipefail

output="$("$1" "$2" "$3")"
status=$?
echo "$output"
[[ $status == 1 ]] && grep -qxF "  $4" <<<"$output"
