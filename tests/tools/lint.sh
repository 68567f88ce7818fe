#!/usr/bin/env bash
# lint.sh: formatting and lint of Python and of shell scripts, for `make lint` and `make check`. From make: BIN.
set -euo pipefail
"$BIN/ruff" format --check
"$BIN/ruff" check
exec "$BIN/shellcheck" tests/tools/*.sh .ci/run
