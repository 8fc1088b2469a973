#!/bin/bash
# Two trainers and a daemon ($CHORUSD); both must find the line that their points lie on.
set -euo pipefail

: "${CHORUSD:?the path of chorusd}"
readonly directory="$(mktemp -d /tmp/chorus_consumer_XXXXXX)"
daemon=""
finish() {
  [[ -z "$daemon" ]] || kill "$daemon" 2>/dev/null || true
  rm -rf "$directory"
}
trap finish EXIT

exec {started}< <(exec "$CHORUSD" --listen="unix:$directory/d.sock" --host_devices=2 2>"$directory/log")
daemon=$!
if ! read -r -t 60 -u "$started" line; then
  cat "$directory/log" >&2
  echo "chorusd has not started" >&2
  exit 1
fi
echo "$line"

export CHORUS_ADDRESS="unix:$directory/d.sock" CHORUS_WORLD=consumer WORLD_SIZE=2
trainers=()
for rank in 0 1; do
  RANK=$rank timeout 60 ./trainer >"$directory/$rank" 2>&1 &
  trainers+=($!)
done
status=0
for trainer in "${trainers[@]}"; do
  wait "$trainer" || status=1
done
cat "$directory/0" "$directory/1"
for rank in 0 1; do
  grep -qx "rank $rank: y = 3.0000 x -1.0000" "$directory/$rank" || status=1
done
exit $status
