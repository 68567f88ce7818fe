#!/bin/sh
# environment.sh NAME FOLDER [REQUIREMENT [OTHER]]: installs what only some tests need into an environment of its own, for `make setup-NAME`.
#
# From make: PY (of .venv), UV (a uv, or empty: pip).
set -eu
name=$1 folder=$2

new_venv() { # OPTION_OF_UV OPTION_OF_VENV: with the Python of .venv
  if [ -n "$UV" ]; then "$UV" venv -q "$1" --python "$PY" "$folder"; else "$PY" -m venv ${2:+"$2"} "$folder"; fi
}
install() { # WORDS OF PIP INSTALL...
  if [ -n "$UV" ]; then
    "$UV" pip install -q --python "$folder/bin/python" "$@"
  else
    "$folder/bin/python" -m pip install -q --disable-pip-version-check "$@"
  fi
}
packages_of() { # FOLDER: where it has its packages
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

set_up() {
  case $name in
  fuzz) # into .venv itself
    install -c constraints.txt atheris
    ;;
  oldest) # the lowest versions that pyproject.toml names, which only uv can choose; what these need in turn is the newest
    [ -x "$folder/bin/python" ] || "$3" -m venv "$folder"
    uv=${UV:-$folder/bin/uv}
    "$uv" --version >/dev/null 2>&1 || "$folder/bin/python" -m pip install -q --disable-pip-version-check uv
    "$uv" pip install -q --python "$folder/bin/python" --resolution lowest-direct -e '.[dev]'
    ;;
  integrations) # DeepSpeed's build asks the installed torch for its version, and needs setuptools and wheel beside it
    new_venv --allow-existing ""
    install -c constraints.txt -e . setuptools wheel
    install -c constraints.txt --no-build-isolation -e '.[integrations]'
    ;;
  flower) # asks for older versions of some packages than constraints.txt has: the others are pinned
    new_venv --allow-existing ""
    grep -E '^(cyclonedds|eclipse-zenoh|msgpack|numpy|pillow|safetensors|scipy|structlog|torch|torchvision|zstandard)==' constraints.txt >"$folder/constraints.txt"
    install -c "$folder/constraints.txt" -e '.[flower]' "$3" scikit-learn
    ;;
  flower-other) # stands on the environment of the newest, OTHER: another flwr with what it asks for, which comes first, and gradbus, for its command
    new_venv --clear --clear
    install -c "$4/constraints.txt" "$3"
    install --no-deps -e .
    packages_of "$4" >"$(packages_of "$folder")/dependencies.pth" # a .pth line adds the folder
    ;;
  *)
    echo "environment.sh: no environment '$name'" >&2
    exit 2
    ;;
  esac
}

# In a shell of its own: `set -e` counts for nothing left of `||`. After a signal this shell goes on, to clean up.
trap : HUP INT TERM
set +e
(
  set -e
  set_up "$@"
)
code=$?
set -e
[ $code = 0 ] || {
  # The next installation cannot tell a half-written package from a whole one, and would keep it.
  [ "$name" = fuzz ] || rm -rf "$folder"
  echo "make setup-${name%-other}: the packages could not be installed. Check that the package registry can be reached, and that the disk has room" >&2
  exit $code
}
