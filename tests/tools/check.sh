#!/usr/bin/env bash
# check.sh [OPTIONS OF PYTEST]: formatting and lint, then strict types beside the pure tests, for `make check`. From make: BIN.
#
# What takes a second comes first and ends the run if it fails. Types and tests use a core each: types have what tests leave of the
# processors, so that the first test runs within seconds, and print when the tests have ended.
set -euo pipefail
bash tests/tools/lint.sh

mkdir -p build
nice -n 5 make --no-print-directory typecheck >build/types.log 2>&1 &
types=$!
# A shell without job control has its background commands ignore Ctrl-C.
trap 'kill "$types" 2>/dev/null || true' EXIT

tests=0 typed=0
"$BIN/pytest" @tests/pure.txt "$@" || tests=$?
wait "$types" || typed=$?
trap - EXIT
cat build/types.log
exit $((tests ? tests : typed))
