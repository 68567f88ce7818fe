# shellcheck shell=bash
# roots.sh: for programs that run something in a Debian root, which source it and set `part`, the name of what they run.
#
# A root is made once and kept outside the clone, in GRADBUS_ROOTS. What this machine lacks to make one ends the program with 0 after
# `NOT RUN: part, reason`.
roots="${GRADBUS_ROOTS:-${XDG_CACHE_HOME:-$HOME/.cache}/gradbus/roots}"

not_run() {
  # shellcheck disable=SC2154 # the program sets part
  echo "NOT RUN: $part, $1"
  exit 0
}
needs_roots() { # GB: of free disk
  [[ "$(id -u)" == 0 ]] || not_run "a root of Debian is made and entered by root"
  command -v debootstrap >/dev/null || not_run "there is no debootstrap on PATH (Debian: apt-get install debootstrap)"
  mkdir -p "$roots"
  (($(df -Pk "$roots" | awk 'NR == 2 {print $4}') >= $1 * 1024 * 1024)) || not_run "less than $1 GB of disk are free in $roots"
}
make_root() { # NAME SUITE PACKAGES [OPTIONS OF DEBOOTSTRAP]: makes $roots/NAME anew. The caller puts `ready` into a root that is complete.
  local root="$roots/$1" log="$roots/$1.log" suite=$2 packages=$3 mirror script
  shift 3
  # The mirror that this machine has, as another may not be reached from it; otherwise Debian's own. Not each machine has sources.list.
  mirror="${DEBIAN_MIRROR:-$(sed -nE 's/^(URIs:|deb) +(\[.*\] +)?(https?:[^ ]+debian\/?)( .*)?$/\3/p' /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -1 || true)}"
  # A suite that is newer than this debootstrap is made as sid is.
  script=/usr/share/debootstrap/scripts/$suite
  [[ -e "$script" ]] || script=/usr/share/debootstrap/scripts/sid
  rm -rf "$root"
  debootstrap --variant=minbase "$@" --include="$packages" "$suite" "$root" "${mirror:-http://deb.debian.org/debian}" "$script" >"$log" 2>&1 || {
    tail -5 "$log"
    rm -rf "$root"
    not_run "debootstrap could not make the root: see $log"
  }
}
needs_uv() { # sets uv: to that of PATH, or of .venv. It trusts the system's certificates only when it is told where they are.
  # shellcheck disable=SC2034 # for the program that sources this
  uv=$(command -v uv || command -v "$PWD/.venv/bin/uv") || not_run "there is no uv on PATH, nor in .venv"
  export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}"
  if [[ -z "${SSL_CERT_FILE:-}" && -e /etc/ssl/certs/ca-certificates.crt ]]; then export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt; fi
}
