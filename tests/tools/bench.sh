#!/usr/bin/env bash
# bench.sh PART [OPTIONS]: runs a benchmark, for `make bench PART=...`. From make: PY. No PART: the whole suite.
set -euo pipefail
part=$1
shift
tools="$PWD/tests/tools"

bench() {
  "$PY" -m gradbus.experiments.bench "$@"
}

case $part in
"") bench "$@" ;;
quick | scale) bench "--$part" "$@" ;;
renew) # tables and plot of docs/benchmarks.md from a full run, the baseline from a quick one, as it is compared with quick ones
  bench --write-docs "$@"
  bench --scale --write-docs "$@"
  bench --quick --write-baseline "$@"
  ;;
profile) PYTHONPATH="$tools" "$PY" -P -m call_profile "$@" ;;
pauses) PYTHONPATH="$tools" "$PY" -P -m pauses "$@" ;;
*) bench "$part" "$@" ;;
esac
