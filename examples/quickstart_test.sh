#!/usr/bin/env bash
# tools/quickstart with programs that are built already: its last line, its curves, and Ctrl-C.
set -euo pipefail
folder="$(mktemp -d /tmp/chorus-quickstart-test.XXXXXX)"
trap 'rm -rf "$folder"' EXIT
mkfifo "$folder/never"
fail() {
  echo "FAILED: $*" >&2
  cat "$folder/output" >&2 || true
  exit 1
}
expect_last() {
  local last
  last="$(tail -n 1 "$folder/output")"
  grep -qxE -- "$1" <<<"$last" || fail "expected a last line like $1, got $last"
}

tools/quickstart --built=. --ranks=2 --training_epochs=1 --plot="$folder/curves.svg" \
  >"$folder/output" 2>&1 || fail "status $?"
expect_last 'quickstart: accuracy=0\.[78][0-9]* ranks=2 steps_per_second=[0-9.]+ identical_parameters=yes'
grep -q '</svg>' "$folder/curves.svg" || fail "no curves"
grep -q '^accuracy, ' "$folder/output" || fail "no curves on the terminal"

tools/quickstart --built=. --ranks=3 --example=all_reduce >"$folder/output" 2>&1 || fail "status $?"
expect_last 'quickstart: ranks=3 all_reduce=ok gradient=ok mismatch=reported'

status=0
tools/quickstart --no_such_flag >"$folder/output" 2>&1 || status=$?
[[ "$status" -eq 2 ]] || fail "expected the status 2, got $status"

# A group of its own, as a terminal's foreground job is.
set -m
tools/quickstart --built=. --ranks=2 --training_epochs=1000 >"$folder/output" 2>&1 &
job=$!
set +m
left=600
until grep -q '^step' "$folder/output"; do
  ((--left > 0)) || fail "it does not train"
  read -r -t 0.1 <>"$folder/never" || true
done
kill -INT -- "-$job"
status=0
wait "$job" || status=$?
[[ "$status" -ne 0 ]] || fail "interrupted, and the status is 0"
! pgrep -g "$job" >/dev/null || fail "a process is left"
