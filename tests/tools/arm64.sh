#!/usr/bin/env bash
# arm64.sh [torch]: a node of a Flower app on an emulated ARM64 processor takes part in the rounds of a controller on this machine's own, over
# Zenoh. With torch, `gradbus client` does, with PyTorch, through a relay.
#
# The ARM64 side is a root of Debian trixie, whose packages are only unpacked: their installation does not end under emulation. qemu's default
# processor is 20 to 45 times slower than the one that is chosen here.
set -euo pipefail
kind=${1:-flower} python=3.13 # of trixie
case $kind in
flower) part=arm64 disk_gb=5 ;;
torch) part=arm64-torch disk_gb=8 ;;
*)
  echo "arm64.sh: expected torch or nothing, got '$kind'" >&2
  exit 2
  ;;
esac
# shellcheck source=tests/tools/roots.sh
. tests/tools/roots.sh
root="$roots/trixie-arm64"
needs_roots $disk_gb
command -v dpkg-deb >/dev/null || not_run "there is no dpkg-deb on PATH"
needs_uv

qemu=$(command -v qemu-aarch64-static || echo "$roots/qemu-aarch64-static")
if [[ ! -x "$qemu" ]]; then
  # Of Debian's package, only this program is kept. The user _apt cannot write here, which apt-get warns of.
  fetched=$(mktemp -d)
  (cd "$fetched" && apt-get download -q qemu-user-static && dpkg-deb --fsys-tarfile ./*.deb | tar -xO ./usr/bin/qemu-aarch64-static >program) \
    >"$roots/qemu.log" 2>&1 || not_run "there is no qemu-aarch64-static on PATH, and apt-get could not fetch it: see $roots/qemu.log"
  install -m 755 "$fetched/program" "$qemu"
  rm -rf "$fetched"
fi
if [[ ! -e "$root/ready" ]]; then
  make_root trixie-arm64 trixie python3,ca-certificates --foreign --arch=arm64
  for deb in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$deb" "$root"; done
  rm "$root"/var/cache/apt/archives/*.deb
  touch "$root/ready"
fi
mkdir -p "$root/gradbus" "$root/packages" "$root/scene"
cp "$qemu" "$root/qemu-aarch64-static"

make --no-print-directory wheel
place="$PWD/build/$part"
rm -rf "$place" && mkdir -p "$place/scene"
# Both sides get the same versions of what they share.
grep -E '^(eclipse-zenoh|msgpack|structlog)==' constraints.txt >"$place/constraints.txt"
core="$(echo dist/gradbus_core-*.whl)"
if [[ $kind == torch ]]; then
  # The newest PyTorch whose wheel for this processor asks for no package of CUDA. On this machine it is .venv's that trains with it.
  wanted=("$core" "$(echo dist/gradbus-*.whl)" torch==2.9.1 torchvision==0.24.1) checks=client here=.venv
else
  wanted=("${core}[flower]") checks="imports flower" here="$place/venv"
  "$uv" venv -q --python .venv/bin/python "$here"
  "$uv" pip install -q --python "$here/bin/python" -c "$place/constraints.txt" "${wanted[@]}"
fi
"$uv" pip install -q --python .venv/bin/python --python-version $python --python-platform aarch64-manylinux_2_28 --only-binary :all: --target "$place/packages" \
  -c "$place/constraints.txt" "${wanted[@]}"

# The mounts go with the namespace, and with the process namespace everything that was started.
# shellcheck disable=SC2016 # the shell inside expands these
unshare --mount --pid --mount-proc --fork --kill-child --propagation private bash -euc '
  root=$1 place=$2 here=$3 checks=$4
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
  mount --bind -o ro "$PWD" "$root/gradbus"
  mount --bind "$place/packages" "$root/packages"
  mount --bind "$place/scene" "$root/scene"
  elsewhere="env -i PATH=/usr/sbin:/usr/bin HOME=/root QEMU_CPU=cortex-a72 PYTHONPATH=/packages GRADBUS_KEY_FILE=/scene/job.key chroot $root /qemu-aarch64-static /usr/bin/python3 -P"
  for check in $checks; do
    if [ "$check" = imports ]; then
      (cd /; $elsewhere /gradbus/tests/tools/platform_checks.py --machine aarch64 imports)
    else
      "$here/bin/python" -P tests/tools/platform_checks.py --machine "$(uname -m)" --scene "$place/scene" --elsewhere "$elsewhere" "$check"
    fi
  done
' bash "$root" "$place" "$here" "$checks"
rm -rf "$place"
