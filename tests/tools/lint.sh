#!/usr/bin/env bash
# lint.sh: formatting and lint of Python and of shell scripts, for `make lint` and `make check`. From make: BIN.
set -euo pipefail
"$BIN/ruff" format --check
"$BIN/ruff" check
shopt -s nullglob
exec "$BIN/shellcheck" tests/tools/*.sh tests/deploy/*.sh deploy/slurm/*.sbatch .ci/run
