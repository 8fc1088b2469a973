#!/usr/bin/env bash
# What gpu_check_run does with the stages' programs, with stubs for them and for Python.
set -euo pipefail
folder="$(mktemp -d "/tmp/chorus gpu check test.XXXXXX")"
trap 'rm -rf "$folder"' EXIT
fail() {
  echo "FAILED: $*" >&2
  cat "$folder/output" >&2 || true
  exit 1
}
executable() {
  cat >"$1"
  chmod +x "$1"
}

here="$folder/gpu_check"
mkdir -p "$here/bin" "$here/lib" "$folder/bin"
cp -L tools/gpu_check_run "$here/run"
echo "commit of a test" >"$here/about"
# Each says how it was called; STATUS_NAME in the environment is what one ends with.
for name in bin/gpu_probe bin/cuda_kernels_test bin/cuda_backend_test bin/cuda_test bin/gpu_bench \
  bin/worker_loss_test bin/cuda_vectors_test bin/random_programs bin/all_reduce bin/transformer; do
  executable "$here/$name" <<'END'
#!/bin/sh
name="$(basename "$0")"
echo "ran $name $*"
echo "libraries in $CHORUS_CUDA_LIBRARIES"
for argument in "$@"; do
  case "$argument" in --out=*) echo "$name's" >"${argument#*=}" ;; esac
done
eval "exit \${STATUS_$name:-0}"
END
done
# One rank of the program is enough.
executable "$here/launch" <<'END'
#!/bin/sh
until [ "$1" = -- ]; do shift; done
shift
exec "$@"
END
echo "that gpu_torch is run by the stub" >"$here/gpu_torch.py"
executable "$folder/bin/compute-sanitizer" <<<'#!/bin/sh'
# Has NVIDIA's libraries and PyTorch where the environment says so.
executable "$folder/bin/python3" <<'END'
#!/bin/sh
case "$1" in
  -) echo "$HAS_LIBRARIES" ;;
  -c) [ -n "$HAS_TORCH" ] ;;
  *) echo "ran python3 $(basename "$1") $2 $3 $4"; [ -f "$2" ] ;;
esac
END
export PATH="$folder/bin:$PATH"

status=0
run() { # ARGUMENT...: leaves the exit status in `status`.
  rm -rf "$folder/out"
  status=0
  "$here/run" --out="$folder/out" "$@" >"$folder/output" 2>&1 || status=$?
}
expect_status() { [[ $status == "$1" ]] || fail "expected status $1, got $status"; }
expect() { grep -qE -- "$1" "$folder/output" || fail "expected a line with $1"; }
expect_in() { grep -qE -- "$2" "$folder/out/$1" || fail "expected $2 in $1"; }

# All stages run, in their order.
HAS_TORCH=1 run
expect_status 0
order="$(cut -d: -f1 "$folder/out/summary" | tr '\n' ' ')"
[[ "$order" == "probe kernels backend conformance daemon worker vectors random bench torch sanitizer " ]] || fail "ran $order"
expect_in daemon.log '^ran all_reduce $'
expect_in daemon.log "^ran transformer $here/launch\$"
# The ops' bench is not a part of `bench`, and PyTorch gets what it wrote.
expect_in bench.md '^ran gpu_bench $'
expect_in torch.md '^ran gpu_bench --ops .*--out=.*/ops.jsonl'
expect_in torch.md '^ran python3 gpu_torch.py .*/ops.jsonl .*--out=.*/torch.jsonl'

# Libraries are where the user says, then where Python has them.
HAS_LIBRARIES=/b run --only=kernels
expect_in kernels.log '^libraries in /b$'
HAS_LIBRARIES=/b CHORUS_CUDA_LIBRARIES=/a run --only=kernels
expect_in kernels.log '^libraries in /a:/b$'

# Without PyTorch Chorus's own figures are all there is, and one line says so.
HAS_TORCH= run --only=torch
expect_status 0
expect '^torch: passed'
expect '^torch: .*no PyTorch'
expect_in torch.md '^ran gpu_bench --ops'
! grep -q gpu_torch "$folder/out/torch.md" || fail "gpu_torch.py ran without PyTorch"

# A bench that fails is not set beside anything, and the stage has failed.
HAS_TORCH=1 STATUS_gpu_bench=1 run --only=torch
expect_status 1
expect '^torch: FAILED with status 1'
! grep -q gpu_torch "$folder/out/torch.md" || fail "gpu_torch.py ran without rows"

# What has passed is not run again, and what has failed has failed.
STATUS_cuda_kernels_test=1 run --only=kernels,backend
expect_status 1
cp "$folder/out/summary" "$folder/summary"
resume() {
  status=0
  "$here/run" --out="$folder/out" --resume "$@" >"$folder/output" 2>&1 || status=$?
}
resume --only=kernels,backend
expect_status 1
diff "$folder/summary" "$folder/out/summary" >"$folder/output" || fail "a stage ran again"
resume --only=backend
expect_status 0
resume --only=backend,vectors
expect_status 0
expect '^vectors: passed'

# No GPU, and what no stage is called.
STATUS_gpu_bench=3 run --only=torch
expect_status 3
run --only=torch,what
expect_status 2
expect 'there is no stage what'
echo "passed"
