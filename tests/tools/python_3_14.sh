#!/usr/bin/env bash
# python_3_14.sh: uses this tree's wheels under Python 3.14, where there is no Cyclone DDS, in a root of Debian forky: imports, a session over a
# relay, a federated run with torch.
#
# The packages are installed from outside, with this machine's uv and its cache, as torch takes 5 GB.
set -euo pipefail
part=python-3.14
# shellcheck source=tests/tools/roots.sh
. tests/tools/roots.sh
needs_roots 20
needs_uv

make --no-print-directory wheel
packages="$PWD/build/packages-3.14"
rm -rf "$packages"
"$uv" pip install -q --python .venv/bin/python --python-version 3.14 --python-platform "$(uname -m)-manylinux_2_28" --only-binary :all: \
  --target "$packages" -c constraints.txt dist/gradbus_core-*.whl dist/gradbus-*.whl
PACKAGES="$packages" bash tests/tools/debian.sh forky env PYTHONPATH=/packages python3 -P tests/tools/platform_checks.py --python 3.14 imports session round
rm -rf "$packages"
