#!/bin/sh
# Runs a benchmark briefly: it fails when a result is wrong; how long it took does not matter.
program="$1"
shift
exec "$program" --smoke "$@"
