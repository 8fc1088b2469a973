#!/usr/bin/env bash
# Trainers as processes: that they learn, and what they say when one of them dies or is late.
#
# Usage: trainer_test.sh LAUNCH CHORUSD TRAINER
set -euo pipefail
launch="$PWD/$1"
chorusd="$PWD/$2"
trainer="$PWD/$3"

data=/usr/share/datasets/fashion-mnist
if ! [[ -r "$data/train-images-idx3-ubyte.gz" ]]; then
  echo "expected the images in $data; tools/setup data installs them" >&2
  exit 1
fi
folder="$(mktemp -d /tmp/chorus-trainer-test.XXXXXX)"
trap 'rm -rf "$folder"' EXIT
fail() {
  echo "FAILED: $*" >&2
  cat "$folder"/out "$folder"/err >&2 || true
  exit 1
}

# Waits, a minute at most, until `$@` succeeds.
await() {
  local left=600
  until "$@"; do
    ((--left > 0)) || return 1
    read -r -t 0.1 <>"$folder/never" || true
  done
}
mkfifo "$folder/never"

# Starts a job that will not end by itself and waits until it trains.
start() {
  # What the job before has said is not this one's.
  : >"$folder/out"
  : >"$folder/err"
  # In a group of its own, by which whatever it leaves is found.
  set -m
  "$launch" --chorusd="$chorusd" --ranks=3 "$@" -- "$trainer" --rank={rank} --ranks=3 \
    --training_epochs=1000 >"$folder/out" 2>"$folder/err" &
  job=$!
  set +m
  await grep -q '^step' "$folder/out" || fail "it does not train"
}
pid_of() { pgrep -P "$job" -f -- "--rank=$1 "; }
# The job has ended with 1 and left nothing, and each of these ranks has said `text`.
expect_end() {
  local text="$1" status=0
  shift
  wait "$job" || status=$?
  [[ "$status" -eq 1 ]] || fail "expected the status 1, got $status"
  ! pgrep -g "$job" -a >&2 || fail "a process is left"
  local rank
  for rank in "$@"; do
    grep "^trainer $rank: " "$folder/err" | grep -qF -- "$text" ||
      fail "rank $rank does not say: $text"
  done
}

# The last of the test's images is not one for each rank: it is left out.
echo "== one epoch on three ranks"
"$launch" --chorusd="$chorusd" --ranks=3 -- "$trainer" --rank={rank} --ranks=3 --batch=101 \
  --training_epochs=1 --parameters="$folder/parameters{rank}" --report="$folder/report" \
  >"$folder/out" 2>"$folder/err" || fail "it ended with $?"
cat "$folder/report"
read -r accuracy _ <"$folder/report"
awk -v a="${accuracy#accuracy=}" 'BEGIN { exit !(a >= 0.78 && a < 1) }' || fail "$accuracy"
[[ "$(stat -c %s "$folder/parameters0")" -eq $((4 * (784 * 256 + 256 + 256 * 10 + 10))) ]] ||
  fail "parameters of another size"
for rank in 1 2; do
  cmp "$folder/parameters0" "$folder/parameters$rank" || fail "the parameters differ"
done

echo "== a rank is killed"
start
victim="$(pid_of 1)" || fail "there is no rank 1"
kill -KILL "$victim"
expect_end "rank 1 (pid $victim)" 0 2
grep -q "^launch: rank 1 (pid $victim) was killed by signal 9" "$folder/err" || fail "no cause"

echo "== a rank is late"
start --daemon_flag=--agree_timeout=2s
victim="$(pid_of 2)" || fail "there is no rank 2"
kill -STOP "$victim"
await grep -qF "rank 2 (pid $victim)" "$folder/err" || fail "nobody is told who is late"
kill -KILL "$victim"
expect_end "missing after 2" 0 1
expect_end_named() { grep "^trainer 0: " "$folder/err" | grep -qF "rank 2 (pid $victim)"; }
expect_end_named || fail "the late rank is not named"
