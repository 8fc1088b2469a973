#!/bin/sh
# A Python without torch: its ranks answer, and the benchmark says what is missing and goes on.
set -eu
python="$TEST_TMPDIR/python"
printf '#!/bin/sh\nexec python3 -I -S "$@"\n' >"$python"
chmod +x "$python"
"$1" --smoke --ranks=2 --most_mib=1 --daemon="$2" --torch_python="$python" --torch_rank="$3" \
  user >"$TEST_TMPDIR/out"
cat "$TEST_TMPDIR/out"
grep -q "note: no c10d/Gloo, so that column is missing: .*No module named 'torch'" \
  "$TEST_TMPDIR/out"
grep -q "^all_reduce .*chorus, own memory" "$TEST_TMPDIR/out"
