#!/usr/bin/env bash
# smoke.sh [OPTIONS]: installs the wheels in dist/ into a fresh environment and uses them from an empty folder, for `make smoke`: gradbus-core
# alone; then with DDS; then gradbus on top of it; then without gradbus again. OPTIONS are those of tests/wheel_smoke.py.
#
# From make: PY (of .venv), UV (a uv, or empty: pip), PINS. With pip alone the dependencies are borrowed from .venv: a .pth line adds its folder,
# not the editable install in it.
set -euo pipefail
place=build/smoke
py=$place/venv/bin/python
core=$(echo dist/gradbus_core-*.whl) rest=$(echo dist/gradbus-*.whl)

install() { # REQUIREMENT
  if [[ -n "$UV" ]]; then
    "$UV" pip install -q --python $py -c "$PINS" "$1"
  else
    $py -m pip install -q --disable-pip-version-check --no-deps "$1"
  fi
}
uninstall() { # NAME
  if [[ -n "$UV" ]]; then "$UV" pip uninstall -q --python $py "$1"; else $py -m pip uninstall -q -y "$1"; fi
}
smoke() { # PART: of tests/wheel_smoke.py
  echo "$1:"
  (cd $place/empty && ../venv/bin/python -I ../../../tests/wheel_smoke.py "$@")
}

rm -rf $place
mkdir -p $place/empty
if [[ -n "$UV" ]]; then
  "$UV" venv -q --python "$PY" $place/venv
else
  "$PY" -m venv $place/venv
  "$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$($py -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
fi
install "$core"
smoke core "$@"
install "${core}[dds]"
smoke core-on-dds "$@"
install "$rest"
smoke gradbus "$@"
uninstall gradbus
smoke core-again "$@"
rm -rf $place
