#!/usr/bin/env bash
# What tools/test runs, counts and says, with stubs for Bazel and for the scripts that it calls.
set -euo pipefail
folder="$(mktemp -d /tmp/chorus-phases-test.XXXXXX)"
trap 'rm -rf "$folder"' EXIT
fail() {
  echo "FAILED: $*" >&2
  cat "$folder/output" >&2 || true
  exit 1
}
expect() { grep -qxE -- "$1" "$folder/output" || fail "expected a line $1"; }
expect_none() { ! grep -qE -- "$1" "$folder/output" || fail "expected no line with $1"; }
expect_last() { [[ "$(tail -n 1 "$folder/output")" == "$1" ]] || fail "expected $1 at the end"; }

workspace="$folder/workspace"
mkdir -p "$workspace/tools" "$workspace/tests/consumer" "$folder/bin"
cp -L tools/test tools/count_tests.py "$workspace/tools"
cat >"$folder/two_cases.xml" <<<'<testsuites><testsuite>
  <testcase name="A" status="run" classname="S"/><testcase name="B" status="run" classname="S"/>
</testsuite></testsuites>'
events() {
  echo '{"id":{"testResult":{"label":"//a","run":1,"shard":1}},"testResult":{"status":"PASSED",' \
    '"testActionOutput":[{"name":"test.xml","uri":"file://'"$folder"'/two_cases.xml"}]}}'
}
events >"$folder/events"
executable() {
  cat >"$1"
  chmod +x "$1"
}
# Each says that it ran, and fails if it is told to.
mkfifo "$folder/never"
for script in tools/setup tools/format tools/lint; do
  executable "$workspace/$script" <<END
#!/bin/bash
echo "ran $script \$*"
if [[ "\${WAITING:-}" == $script ]]; then
  bash -c 'echo waiting; read -t 30 <>"$folder/never"'
  echo "$script went on"
fi
[[ "\${FAILING:-}" != $script ]]
END
done
executable "$workspace/tests/consumer/run" <<END
#!/bin/bash
echo "ran tests/consumer/run"
cp "$folder/events" "\$1"
END
executable "$folder/bin/bazel" <<END
#!/bin/bash
if [[ "\$1" == query ]]; then
  case "\$3" in
    attr*) printf '%s' "\${LONGER-//core:longer
}" ;;
    *) printf '%s' "\${OTHERS-//core:other
}" ;;
  esac
  exit
fi
echo "ran bazel \$*"
for argument in "\$@"; do
  [[ "\$argument" != --build_event_json_file=* ]] || cp "$folder/events" "\${argument#*=}"
done
END
export PATH="$folder/bin:$PATH"
unset CI FAILING
run() { "$workspace/tools/test" "$@" >"$folder/output" 2>&1; }

run || fail "status $?"
grep -o '^ran [^ ]*' "$folder/output" >"$folder/order"
diff "$folder/order" - <<'END' || fail "another order"
ran tools/setup
ran tools/format
ran bazel
ran bazel
ran tests/consumer/run
END
expect 'ran tools/format --check'
expect 'ran bazel test .* --config=tsan -- //core/base/... //core/node/... //core/transport/... //core/worker/...'
expect '\[setup\] [0-9]+ s'
expect '\[format\] 1 passed, 0 failed, 0 skipped; [0-9]+ s'
expect '\[default\] 2 passed, 0 failed, 0 skipped; [0-9]+ s'
expect '\[tsan\] 2 passed, 0 failed, 0 skipped; [0-9]+ s'
expect '\[consumer\] 2 passed, 0 failed, 0 skipped; [0-9]+ s'
expect_none 'lint'
expect_last '7 passed, 0 failed, 0 skipped'

run --long || fail "status $?"
expect 'ran bazel test .* --config=tsan -- //core/...'
expect '\[lint\] 1 passed, 0 failed, 0 skipped; [0-9]+ s'
expect 'ran bazel test .* --config=locks -- //server/... //client/...'
expect '\[locks\] 2 passed, 0 failed, 0 skipped; [0-9]+ s'
expect '\[long\] 2 passed, 0 failed, 0 skipped; [0-9]+ s'
expect_last '12 passed, 0 failed, 0 skipped'

# What was asked for, and nothing else.
run --long --config=asan //core/... || fail "status $?"
expect '\[asan\] 2 passed, 0 failed, 0 skipped; [0-9]+ s'
expect_none 'tools/format|tools/lint|tests/consumer|tsan|locks'
expect_last '4 passed, 0 failed, 0 skipped'

# One of the forms alone, where no test has the other. Bazel would fail for want of tests.
LONGER= run --long //core/tensor/... || fail "status $?"
expect '\[default\] 2 passed, 0 failed, 0 skipped; [0-9]+ s'
expect_none '\[long\]'
expect_last '2 passed, 0 failed, 0 skipped'
OTHERS= run --long //tests/hostile/... || fail "status $?"
expect '\[long\] 2 passed, 0 failed, 0 skipped; [0-9]+ s'
expect_none '\[default\]'
expect_last '2 passed, 0 failed, 0 skipped'

LONGER= OTHERS= run --long //no/such/... || fail "status $?"
expect 'ran bazel test .* -- //no/such/...'

# What ThreadSanitizer cannot run it does not run in the longer form.
run --long --config=tsan //core/... || fail "status $?"
expect 'ran bazel test .* --config=tsan --test_tag_filters=longer,-no-tsan -- //core/...'

# A phase that fails is counted, and the others run.
! FAILING=tools/format run || fail "status 0"
expect 'FAILED \[format\] format: exit status 1'
expect 'ran tests/consumer/run'
expect_last '6 passed, 1 failed, 0 skipped'
! FAILING=tools/lint run --long || fail "status 0"
expect 'FAILED \[lint\] lint: exit status 1'
expect_last '11 passed, 1 failed, 0 skipped'

# Without what the set-up installs nothing can run.
! FAILING=tools/setup run || fail "status 0"
expect 'FAILED \[setup\] setup: exit status 1'
expect_none 'ran bazel'
expect_last '0 passed, 1 failed, 0 skipped'

# Whoever interrupts a script that is a phase does not wait for its end.
: >"$folder/output"
WAITING=tools/format "$workspace/tools/test" >"$folder/output" 2>&1 &
job=$!
left=600
until grep -q '^waiting$' "$folder/output"; do
  ((--left > 0)) || fail "the format is not checked"
  read -r -t 0.1 <>"$folder/never" || true
done
kill -TERM "$job"
! wait "$job" || fail "interrupted, and the status is 0"
expect 'FAILED \[format\] format: exit status 130'
expect_none 'went on|ran bazel'

# What to leave out is a target. An option of one letter is none, nor is its value.
run --keep_going //core/... -//core/tensor/... || fail "status $?"
expect 'ran bazel test .* --keep_going -- //core/... -//core/tensor/...'
status=0
run -c opt //core/... || status=$?
[[ $status -eq 2 ]] || fail "expected the status 2, got $status"
expect 'tools/test: unknown option -c; .*'
expect_none 'ran '

# Help is there wherever one calls from.
(cd "$workspace/tools" && ./test --help >"$folder/output" 2>&1) || fail "status $?"
expect '  tools/test --long .*'
