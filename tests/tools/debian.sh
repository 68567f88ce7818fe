#!/usr/bin/env bash
# debian.sh SUITE COMMAND...: runs a command in a Debian root, on a copy of the last commit, as root and in a mount namespace of its own.
# The root is made once and kept outside the clone. It is for other versions of libc and Python, not a fence: it has this machine's network.
# PACKAGES: a folder of this machine that the command finds as /packages.
set -euo pipefail
suite=$1
shift
part="debian-$suite"
# shellcheck source=tests/tools/roots.sh
. tests/tools/roots.sh
root="$roots/$suite"

needs_roots 20
if [[ ! -e "$root/ready" ]]; then
  make_root "$suite" "$suite" python3,python3-venv,make,git,ca-certificates,iproute2,procps
  touch "$root/ready"
fi

# Names and certificates of this machine's network.
cp /etc/resolv.conf /etc/hosts "$root/etc/"
if [[ -e /etc/ssl/certs/ca-certificates.crt ]]; then cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"; fi
rm -rf "$root/gradbus.new" && mkdir "$root/gradbus.new"
git archive HEAD | tar -x -C "$root/gradbus.new"
# The environment of the last time stays where it was made of the same packages.
if cmp -s "$root/gradbus/requirements.lock" requirements.lock && cmp -s "$root/gradbus/pyproject.toml" pyproject.toml && [[ -d "$root/gradbus/.venv" ]]; then
  mv "$root/gradbus/.venv" "$root/gradbus.new/"
fi
rm -rf "$root/gradbus" && mv "$root/gradbus.new" "$root/gradbus"
mkdir -p "$root/data" "$root/packages"
# The mounts go with the namespace, and with the process namespace everything that was started.
# shellcheck disable=SC2016 # the shell inside expands these
exec unshare --mount --pid --fork --kill-child --propagation private bash -euc '
  root=$1 data=$2 packages=$3
  shift 3
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
  if [[ -n "$data" ]]; then mount --bind -o ro "$data" "$root/data"; fi
  if [[ -n "$packages" ]]; then mount --bind "$packages" "$root/packages"; fi
  exec chroot "$root" env -u PIP_FIND_LINKS -u PYTHONPATH HOME=/root TMPDIR=/tmp PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    GRADBUS_DATA=${data:+/data} bash -c "cd /gradbus && exec \"\$@\"" bash "$@"
' bash "$root" "${GRADBUS_DATA:-}" "${PACKAGES:-}" "$@"
