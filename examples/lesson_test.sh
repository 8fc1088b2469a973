#!/usr/bin/env bash
# Runs a lesson as its README says.
#
# Usage: lesson_test.sh LAUNCH CHORUSD PROGRAM RANKS DEVICES STATUS [TEXT...]
set -euo pipefail
launch="$1"
chorusd="$2"
program="$3"
ranks="$4"
devices="$5"
expected="$6"
shift 6

status=0
output="$("$launch" --chorusd="$chorusd" --ranks="$ranks" --daemon_flag=--host_devices="$devices" \
  -- "$program" 2>&1)" || status=$?
echo "$output"
if [[ "$status" -ne "$expected" ]]; then
  echo "FAILED: expected the status $expected, got $status" >&2
  exit 1
fi
for text in "$@"; do
  if ! grep -qF -- "$text" <<<"$output"; then
    echo "FAILED: nobody says: $text" >&2
    exit 1
  fi
done
