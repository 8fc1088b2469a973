#!/bin/bash
# forbidden_deps.sh TARGET FILE: fails if FILE, the forbidden dependencies of TARGET, is not empty.

set -euo pipefail

readonly target="$1" found="$2"
# A missing file is a failure too.
[[ -r "$found" ]]
if [[ -s "$found" ]]; then
  echo "$target must not depend on:"
  sed 's/^/  /' "$found"
  echo "The way there: bazel query 'somepath($target, $(head -n 1 "$found"))'"
  exit 1
fi
