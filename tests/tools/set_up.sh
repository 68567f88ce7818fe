#!/bin/sh
# set_up.sh [TORCH]: makes .venv and installs everything into it, for `make setup`.
#
# From make: PYTHON, VENV, UV (a uv that is there, or empty), FETCH_UV (not empty: fetch one), LOCKED (not empty: only files whose hash
# requirements.lock has), TORCH_INDEX. It needs no more than sh, as a fresh clone may have no other shell. A step that fails ends in one line
# that says what to do; where uv cannot reach its registry, pip and pip's configuration install the packages.
set -eu
py="$VENV/bin/python" uv="$UV"
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

fail() {
  echo "make setup: $1, then: make setup${2:-}" >&2
  exit 1
}

install_with() { # INSTALLER...: a command that takes the options of `pip install`
  if [ -n "$LOCKED" ]; then
    "$@" --require-hashes -r requirements.lock && "$@" --no-deps --no-build-isolation -e .
  else
    "$@" -c constraints.txt -e '.[dev]'
  fi
}

"$PYTHON" -c "$new_enough" 2>/dev/null ||
  fail "needs Python 3.11 or newer, but '$PYTHON' is $("$PYTHON" --version 2>/dev/null || echo not there). Install one" " PYTHON=python3.12"
"$py" -c "$new_enough" 2>/dev/null || rm -rf "$VENV"
no_venv="$VENV could not be made. Install Python's venv module (Debian: python3-venv)"
if [ -n "$uv" ]; then
  "$uv" venv -q --allow-existing --python "$(command -v "$PYTHON")" "$VENV" || fail "$no_venv"
elif [ ! -x "$py" ]; then
  "$PYTHON" -m venv "$VENV" || fail "$no_venv"
fi

if [ -n "$FETCH_UV" ]; then
  echo "fetching uv into $VENV"
  if "$py" -m pip install -q --disable-pip-version-check uv && "$VENV/bin/uv" --version; then
    uv="$VENV/bin/uv"
  else
    echo "uv could not be fetched: going on with pip, which takes minutes"
  fi
fi

# It has said why, if it failed.
[ -n "$LOCKED" ] || "$py" -I tests/tools/torch_build.py --index "$TORCH_INDEX" --uv "$uv" "$@" || exit 1

if [ -n "$uv" ]; then
  if install_with "$uv" pip install --python "$py"; then exit 0; fi
  echo "uv could not install the packages: going on with pip, which takes minutes"
fi
"$py" -m pip --version >/dev/null 2>&1 || "$py" -m ensurepip >/dev/null
install_with "$py" -m pip install --disable-pip-version-check ||
  fail "the packages could not be installed. Check that the package registry can be reached (PIP_INDEX_URL and UV_DEFAULT_INDEX name another one) and that 6 GB of disk are free"
