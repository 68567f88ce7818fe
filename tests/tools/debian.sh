#!/usr/bin/env bash
# debian.sh SUITE COMMAND...: runs a command in a Debian root, on a copy of the last commit, as root and in a mount namespace of its own.
# The root is made once and kept outside the clone. It is for other versions of libc and Python, not a fence: it has this machine's network.
set -euo pipefail
suite=$1
shift
part="debian-$suite"
roots="${GRADBUS_ROOTS:-${XDG_CACHE_HOME:-$HOME/.cache}/gradbus/roots}"
root="$roots/$suite"

not_run() {
  echo "NOT RUN: $part, $1"
  exit 0
}
[[ "$(id -u)" == 0 ]] || not_run "a root of Debian is made and entered by root"
command -v debootstrap >/dev/null || not_run "there is no debootstrap on PATH (Debian: apt-get install debootstrap)"
mkdir -p "$roots"
(($(df -Pk "$roots" | awk 'NR == 2 {print $4}') >= 20 * 1024 * 1024)) || not_run "less than 20 GB of disk are free in $roots"

if [[ ! -e "$root/ready" ]]; then
  # The mirror that this machine has, as another may not be reached from it; without one debootstrap takes Debian's own.
  mirror="${DEBIAN_MIRROR:-$(sed -nE 's/^(URIs:|deb) +(\[.*\] +)?(https?:[^ ]+debian\/?)( .*)?$/\3/p' /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -1)}"
  rm -rf "$root"
  debootstrap --variant=minbase --include=python3,python3-venv,make,git,ca-certificates,iproute2,procps "$suite" "$root" ${mirror:+"$mirror"} \
    >"$roots/$suite.log" 2>&1 || {
    tail -5 "$roots/$suite.log"
    rm -rf "$root"
    not_run "debootstrap could not make the root: see $roots/$suite.log"
  }
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
mkdir -p "$root/data"
# The mounts go with the namespace, and with the process namespace everything that was started.
# shellcheck disable=SC2016 # the shell inside expands these
exec unshare --mount --pid --fork --kill-child --propagation private bash -euc '
  root=$1 data=$2
  shift 2
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
  if [[ -n "$data" ]]; then mount --bind -o ro "$data" "$root/data"; fi
  exec chroot "$root" env -u PIP_FIND_LINKS -u PYTHONPATH HOME=/root TMPDIR=/tmp PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    GRADBUS_DATA=${data:+/data} bash -c "cd /gradbus && exec \"\$@\"" bash "$@"
' bash "$root" "${GRADBUS_DATA:-}" "$@"
