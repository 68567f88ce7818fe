#!/usr/bin/env bash
# lock.sh [OPTIONS OF UV]: writes constraints.txt and requirements.lock from pyproject.toml, for `make lock`. From make: UV.
set -euo pipefail
[[ -n "$UV" ]] || {
  echo "make lock: needs uv. Install it (pip install uv), then: make lock" >&2
  exit 1
}
mkdir -p build
cp constraints.txt build/constraints.txt # pins that still fit are kept

compile() {
  "$UV" pip compile -q --universal --python-version 3.11 --extra dev --no-header --no-annotate "$@" pyproject.toml
}
compile --extra fuzz --extra integrations "$@" -o build/constraints.txt
{
  echo "# Made by make lock: the versions that a set-up takes and the tests have seen."
  cat build/constraints.txt
} >constraints.txt
compile --no-emit-index-url --no-emit-find-links --generate-hashes -c constraints.txt -o build/requirements.lock
{
  echo "# Made by make lock: what make setup LOCKED=1 installs, file by file."
  cat build/requirements.lock
} >requirements.lock
