#!/usr/bin/env bash
# test_part.sh PART [OPTIONS OF PYTEST]: runs tests, for `make test PART=...`. No PART: all of them.
#
# From make: BIN, PYTHON, VENV, SPREAD (how pytest-xdist shares out the files), SLICE, DEBIAN. A part that needs what this machine does not have
# prints `NOT RUN: part, reason` and ends with 0.
set -euo pipefail
part=$1
shift
# shellcheck disable=SC2153 # SPREAD is no misspelling of spread
read -ra spread <<<"$SPREAD"
disk_gb=20 # an environment takes 6 GB, and pip's cache as much again

not_run() {
  echo "NOT RUN: make test PART=$part${1:+ $1}, $2"
  exit 0
}
make_here() {
  make --no-print-directory "$@"
}
# A number, such as 3.13, is looked for on PATH, then among pyenv's versions. A program that does not start is none: pyenv puts such ones on PATH.
find_python() {
  local found
  case $1 in
  3.*)
    for found in "python$1" "$HOME/.pyenv/versions/$1".*/bin/"python$1"; do
      if "$found" -c '' 2>/dev/null; then
        command -v "$found"
        return
      fi
    done
    ;;
  *) echo "$1" ;;
  esac
}
needs_disk() {
  (($(df -Pk . | awk 'NR == 2 {print $4}') >= disk_gb * 1024 * 1024)) || not_run "" "less than $disk_gb GB of disk are free"
}

case $part in
"")
  mkdir -p build
  rm -f .pytest_cache/v/cache/lastfailed build/tests-ended
  code=0
  "$BIN/pytest" "${spread[@]}" "$@" || code=$?
  echo $code >build/tests-ended
  exit $code
  ;;
again) # A test of deadlines may fail where other work has the machine for seconds. It passes by itself, or it has failed.
  # More than three are no accident, nor is a run that did not come to its end, or in which a worker has crashed (pytest's exit code 1: tests
  # have failed, and nothing else).
  [[ "$(cat build/tests-ended 2>/dev/null)" == 1 ]] || {
    echo "make test PART=again: make test has not come to its end" >&2
    exit 1
  }
  "$BIN/python" -c 'import json, sys; failed = list(json.load(open(".pytest_cache/v/cache/lastfailed")))
print(*(f"once more, by itself: {name}" for name in failed), sep="\n"); sys.exit(not 0 < len(failed) <= 3)'
  exec "$BIN/pytest" --last-failed --last-failed-no-failures none
  ;;
slice) # What shows that an environment works: both paradigms, then the parts that everything else stands on.
  "$BIN/gradbus" demo --rounds 2 --data glyphs --no-live
  "$BIN/gradbus" run -n 2 -- experiments/configs/ddp.conf.json --set task.data=glyphs --set parallel.epochs=1 --no-live
  make_here test PART= ARGS="$SLICE" || make_here test PART=again
  ;;
python) # Both ends of what pyproject.toml allows, each in an environment of its own: a newer Python ...
  needs_disk
  found=$(find_python "$PYTHON")
  [[ -n "$found" ]] || not_run "$PYTHON" "there is no python$PYTHON on PATH, nor among pyenv's versions"
  make_here setup test PART=slice PYTHON="$found" VENV=".venv-python-${PYTHON##*/}"
  ;;
oldest) # ... and the lowest versions, under the oldest Python.
  needs_disk
  found=$(find_python 3.11)
  [[ -n "$found" ]] || not_run "" "there is no python3.11 on PATH, nor among pyenv's versions"
  make_here .venv-oldest/.set-up-oldest OLDEST_PYTHON="$found"
  make_here test PART=slice VENV=.venv-oldest LOCKED= TORCH=
  ;;
debian) # The slice, and what depends on libc.
  exec bash tests/tools/debian.sh "$DEBIAN" make setup test PART=slice LOCKED=1 "SLICE=$SLICE tests/runtime/test_keep_memory.py tests/runtime/shm"
  ;;
arm64-torch) exec bash tests/tools/arm64.sh torch ;;
python-3.14 | arm64) # What Cyclone DDS has no wheel for: over Zenoh, with this tree's wheels.
  exec bash "tests/tools/${part//[-.]/_}.sh"
  ;;
gpu)
  "$BIN/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || not_run "" "torch sees no CUDA device"
  exec "$BIN/pytest" -m gpu "$@"
  ;;
portable) # Without those that need a process's end noticed sooner than its lease ends.
  GRADBUS_PORTABLE=1 exec "$BIN/pytest" "${spread[@]}" -k "not killed and not dies and not dead" "$@" \
    tests/actors/test_flows.py tests/actors/test_flows_in_process.py tests/actors/data_parallel \
    tests/torch_backend/test_ddp.py tests/torch_backend/test_collectives.py tests/torch_backend/test_wrappers.py \
    tests/runtime/collectives/test_group_processes.py tests/commands/test_portable.py
  ;;
flower) exec "$BIN/pytest" "$@" tests/actors/flower tests/commands/run/test_flower.py ;;
faults) exec "$BIN/pytest" "${spread[@]}" -m faults "$@" ;;
*)
  echo "make test: there is no part '$part'. The parts: again, slice, python, oldest, debian, python-3.14, arm64, arm64-torch, gpu, portable, flower, faults; none: all tests" >&2
  exit 2
  ;;
esac
