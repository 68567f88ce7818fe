#!/usr/bin/env bash
# containers.sh: builds the images of deploy/ that need no torch, on a root of Debian, and runs them and deploy/compose.yaml under podman.
#
# podman has its storage, settings and networks in GRADBUS_ROOTS, and the network namespace of this script: its bridges and rules of iptables go with that.
set -euo pipefail
part=containers
# shellcheck source=tests/tools/roots.sh
. tests/tools/roots.sh
# shellcheck source=tests/tools/deploy_part.sh
. tests/tools/deploy_part.sh
# shellcheck source=tests/tools/podman.sh
. tests/tools/podman.sh
needs "debootstrap buildah podman runc iptables unshare" "debootstrap buildah podman runc netavark aardvark-dns catatonit iptables"
needs_roots 6
bin=${BIN:-.venv/bin}
root="$roots/bookworm-image" place="$roots/containers"
needs_namespaces "$place"
if [[ ! -e "$root/ready" ]]; then
  make_root bookworm-image bookworm ca-certificates
  touch "$root/ready"
fi
needs_compose "$roots/containers/tools"
podman_in "$place"

hadolint deploy/Containerfile
buildah inspect localhost/gradbus-debian >/dev/null 2>&1 || base_image "$root"
for target in base relay flower-node; do build_image $target "localhost/gradbus-$target"; done

[[ -e /usr/bin/prometheus ]] || echo "NOT RUN: $part, Prometheus beside the members, there is no /usr/bin/prometheus (Debian: apt-get install prometheus)"
# Members of deploy/compose.yaml have the Python of Debian 12 and the packages of this checkout.
tests=(tests/deploy/containers/images.py tests/deploy/containers/compose.py)
if [[ "$("$bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != 3.11 ]]; then
  echo "NOT RUN: $part, deploy/compose.yaml, Debian 12 has Python 3.11 and $bin has another one"
  unset "tests[1]"
fi

# shellcheck disable=SC2016 # the shell inside expands these
unshare --mount --net --pid --mount-proc --fork --kill-child bash -euc '
  ip link set lo up
  . tests/tools/podman.sh
  own_run_folder
  # What a run that was killed has left.
  podman rm --all --force >/dev/null 2>&1
  podman volume prune --force >/dev/null
  podman network prune --force >/dev/null
  rm -rf "$1/run/networks"
  shift
  exec "$@"
' bash "$place" env PYTHONPATH=tests/deploy/containers "$bin/pytest" -n 0 -q -p no:cacheprovider "${tests[@]}"
