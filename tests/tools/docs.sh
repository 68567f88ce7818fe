#!/usr/bin/env bash
# docs.sh: writes each page and table that is made from the code or from stored results, for `make docs`. From make: BIN.
#
# What is measured stands elsewhere: `make bench PART=renew` (docs/benchmarks.json), `make figures`, `make nightly`, `make simulate-faults
# PLANT=all ARGS=--write`. A page is replaced when it has been written to its end.
set -euo pipefail
mkdir -p build

page() { # NAME COMMAND...: a page is all that a command prints
  local name=$1
  shift
  "$@" >"build/$name"
  mv "build/$name" "docs/$name"
}
page settings.md "$BIN/gradbus" config reference --markdown
page matrix.md "$BIN/gradbus" matrix --markdown
"$BIN/python" -m gradbus.experiments.studies.communication_table --write docs/algorithms.md
"$BIN/python" -c 'from gradbus.experiments.bench.__main__ import DOCS, DOCS_RESULTS, TITLES, Results, document
document.write(DOCS, Results.load(DOCS_RESULTS), TITLES)'
PYTHONPATH="$PWD/tests/tools" "$BIN/python" -P -m platforms --write
PYTHONPATH="$PWD/tests/tools" "$BIN/python" -P -m public_names --write # the last, as it reads the others
