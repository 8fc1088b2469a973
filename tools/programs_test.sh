#!/usr/bin/env bash
# The scripts use programs of the default configuration, wherever bazel-bin points: here to one
# whose programs fail, in a folder whose name has spaces. Bazel is a stub that knows where the default configuration is.
set -euo pipefail
runfiles="$PWD"
folder="$(mktemp -d "/tmp/chorus programs test.XXXXXX")"
trap 'rm -rf "$folder"' EXIT
fail() {
  echo "FAILED: $*" >&2
  cat "$folder/output" >&2 || true
  exit 1
}
expect() { grep -qE -- "$1" "$folder/output" || fail "expected a line with $1"; }

workspace="$folder/workspace"
mkdir -p "$workspace/tools" "$folder/bin"
for script in launch built quickstart conformance bench; do
  cp -L "tools/$script" "$workspace/tools/$script"
done
executable() {
  mkdir -p "$(dirname "$1")"
  cat >"$1"
  chmod +x "$1"
}
executable "$workspace/tools/setup" <<<'#!/bin/bash'
for program in server/chorusd examples/01_all_reduce/all_reduce tests/vectors/conformance \
  benchmarks/chorus_bench; do
  executable "$folder/tsan/$program" <<'END'
#!/bin/bash
echo "the wrong configuration: $0"
exit 77
END
  if [[ -x "$runfiles/$program" ]]; then
    mkdir -p "$(dirname "$folder/default/$program")"
    ln -s "$runfiles/$program" "$folder/default/$program"
  else
    executable "$folder/default/$program" <<'END'
#!/bin/bash
echo "right: $0 $*"
END
  fi
done
ln -s "$folder/tsan" "$workspace/bazel-bin"
executable "$folder/bin/bazel" <<END
#!/bin/bash
echo "bazel \$*" >>"$folder/asked"
[[ "\$PWD" == "$workspace" ]] || exit 2
case "\$1" in
  build) [[ "\$*" != *no_such_target* ]] ;;
  info) echo "$folder/default" ;;
esac
END
export PATH="$folder/bin:$PATH"

executable "$folder/default/examples/05_trainer/trainer" <<'END'
#!/bin/bash
for argument in "$@"; do
  case "$argument" in
    --parameters=*) echo 1 >"${argument#*=}" ;;
    --report=*) echo "accuracy=0.8499 steps_per_second=1" >"${argument#*=}" ;;
  esac
done
END

cd "$folder"
run() { "$@" >"$folder/output" 2>&1; }
run "$workspace/tools/launch" --ranks=2 -- //examples/01_all_reduce:all_reduce || fail "status $?"
expect 'rank 0: all_reduce=ok'
grep -q 'bazel build.* //server:chorusd //examples/01_all_reduce:all_reduce' asked || fail "not built"
run "$workspace/tools/launch" --ranks=2 -- default/examples/01_all_reduce/all_reduce ||
  fail "status $?"
expect 'rank 1: all_reduce=ok'
run "$workspace/tools/quickstart" --ranks=2 --example=all_reduce || fail "status $?"
expect '^quickstart: ranks=2 all_reduce=ok gradient=ok mismatch=reported$'
# A rank alone has nobody to disagree with.
run "$workspace/tools/quickstart" --ranks=1 --example=all_reduce || fail "status $?"
expect '^quickstart: ranks=1 all_reduce=ok gradient=ok mismatch=none$'
# What accuracy is expected is known of four ranks: others make fewer steps, or more.
run "$workspace/tools/quickstart" --ranks=5 || fail "status $?"
expect '^quickstart: accuracy=0.8499 ranks=5 .* identical_parameters=yes$'
! run "$workspace/tools/quickstart" || fail "status 0"
expect 'expected an accuracy of at least 0.85'
run "$workspace/tools/conformance" --transport=unary || fail "status $?"
expect "^right: .*/conformance --daemon=$folder/default/server/chorusd .*--transport=unary"
run "$workspace/tools/bench" --quick small || fail "status $?"
expect "^right: .*/chorus_bench --daemon=$folder/default/server/chorusd .*--quick small"

# Help is there wherever one calls from.
for script in quickstart conformance bench launch; do
  (cd "$workspace/tools" && run "./$script" --help) || fail "$script --help: status $?"
  expect "tools/$script "
done

# Where `sleep` takes no time: what launch waits for is counted then, not timed.
executable "$folder/fast/sleep" <<END
#!/bin/bash
echo slept >>"$folder/slept"
exec /bin/sleep 0.01
END
# A daemon that gets ready after 15 s, as one does whose GPU takes its time.
executable "$folder/slow_daemon" <<END
#!/bin/bash
trap 'exit 0' TERM
until [[ \$(wc -l <"$folder/slept") -ge 150 ]]; do /bin/sleep 0.01; done
echo "chorusd serves now"
while :; do /bin/sleep 0.01; done
END
: >"$folder/slept"
PATH="$folder/fast:$PATH" run "$workspace/tools/launch" --ranks=1 --chorusd="$folder/slow_daemon" -- true ||
  fail "status $?"
expect '^launch: the daemon is still starting$'

# A rank that does not listen is no reason to wait for ever, nor to be left behind: when another one has
# failed (this program's rank 0), and when launch is told to end. It would end by itself, too.
executable "$folder/deaf" <<END
#!/bin/bash
if [[ \$RANK == 0 ]]; then
  until [[ -e "$folder/deaf.pid" ]]; do /bin/sleep 0.01; done
  exit 7
fi
trap '' TERM
echo \$\$ >"$folder/deaf.new"
mv "$folder/deaf.new" "$folder/deaf.pid"
for _ in {1..1500}; do /bin/sleep 0.02; done
touch "$folder/ended_by_itself"
END
status=0
PATH="$folder/fast:$PATH" run "$workspace/tools/launch" --ranks=2 -- "$folder/deaf" || status=$?
[[ "$status" -eq 1 ]] || fail "expected the status 1, got $status"
expect '^launch: rank 0 \(pid [0-9]+\) exited with 7$'
expect "^launch: ending the ranks that go on: 1 \(pid $(cat "$folder/deaf.pid")\)$"
[[ ! -e "$folder/ended_by_itself" ]] || fail "launch waited for the rank"
! kill -0 "$(cat "$folder/deaf.pid")" 2>/dev/null || fail "rank 1 was left behind"
rm "$folder/deaf.pid"
sed -i 's/^  exit 7/  exit 0/' "$folder/deaf"
PATH="$folder/fast:$PATH" "$workspace/tools/launch" --ranks=2 -- "$folder/deaf" >"$folder/output" 2>&1 &
launch=$!
until [[ -e "$folder/deaf.pid" ]]; do kill -0 "$launch" || fail "launch ended"; done
kill "$launch"
status=0
wait "$launch" || status=$?
[[ "$status" -eq 143 ]] || fail "expected the status 143, got $status"
[[ ! -e "$folder/ended_by_itself" ]] || fail "launch waited for the rank"
! kill -0 "$(cat "$folder/deaf.pid")" 2>/dev/null || fail "rank 1 was left behind"

# Ranks that die at once: bash may forget that the others were its jobs when it has told of the first.
for _ in 1 2 3; do
  status=0
  PATH="$folder/fast:$PATH" run "$workspace/tools/launch" --ranks=5 -- bash -c 'kill -ABRT $$' || status=$?
  [[ "$status" -eq 1 ]] || fail "expected the status 1, got $status"
  for rank in 0 1 2 3 4; do expect "^launch: rank $rank \(pid [0-9]+\) was killed by signal 6$"; done
done

# With a bash before 5.1 nobody's end is known: that is no success.
wait() {
  [[ " $* " != *" -p "* ]] || return 2
  builtin wait "$@"
}
export -f wait
status=0
run "$workspace/tools/launch" --ranks=2 -- default/examples/01_all_reduce/all_reduce || status=$?
unset -f wait
[[ "$status" -eq 1 ]] || fail "expected the status 1, got $status"
expect '^launch: expected bash 5.1 or newer'

# A build that fails is no run of what an earlier one has left.
status=0
run "$workspace/tools/launch" -- //no_such_target || status=$?
[[ "$status" -eq 1 ]] || fail "expected the status 1, got $status"
expect 'cannot build //server:chorusd //no_such_target:no_such_target'
