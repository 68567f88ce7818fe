#!/usr/bin/env bash
# check.sh [OPTIONS OF PYTEST]: formatting and lint, strict types, and the pure tests, all at a time, for `make check`. From make: BIN.
#
# The files that tests/pure.txt names go to two processes by turns, or to WORKERS: each collects its own alone, so that the first test runs
# within seconds. The first process writes here, and the others, and types, when they have ended. Lint takes a second, and ends the run if it
# fails. Types take what the tests leave of the processors.
set -euo pipefail
shards=${WORKERS:-2}
((shards > 0)) || shards=1 # WORKERS=0: one after the other, as for make test
mkdir -p build
started=()
trap 'kill "${started[@]}" 2>/dev/null || true' EXIT

run_shard() { # NUMBER OPTIONS...
  local number=$1 files
  shift
  mapfile -t files < <(xargs -I{} find {} -name 'test_*.py' <tests/pure.txt | sort | awk -v n="$shards" -v k="$number" 'NR % n == k - 1')
  ((${#files[@]} > 0)) || exit 0 # there are more processes than files
  exec "$BIN/pytest" -o cache_dir=".pytest_cache/check-$number" "$@" "${files[@]}"
}
for ((number = 2; number <= shards; number++)); do
  run_shard $number "$@" >"build/check-$number.log" 2>&1 &
  started+=($!)
done
run_shard 1 "$@" &
started+=($!)

bash tests/tools/lint.sh >build/lint.log 2>&1 || {
  cat build/lint.log
  exit 1
}
nice -n 5 make --no-print-directory typecheck >build/types.log 2>&1 &
started+=($!)

failed=0
for process in "${started[@]}"; do
  code=0
  wait "$process" || code=$?
  ((code == 0 || code == 5)) || failed=1 # 5: no test of these files is selected by the options
done
started=()
for ((number = 2; number <= shards; number++)); do cat "build/check-$number.log"; done
cat build/types.log
exit $failed
