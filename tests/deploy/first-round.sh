#!/usr/bin/env bash
# first-round.sh: from a podman that has nothing to the first round of deploy/compose.yaml, by the commands of docs/containers.md, with a clock.
#
# It builds the image `full`, which takes minutes and some GB, and removes it at the end. Prometheus is left out. TORCH_WHEEL: file of a build of torch
# for CPUs, where PyTorch's index cannot be reached; then the other versions are those that fit it.
set -euo pipefail
part=first-round
# shellcheck source=tests/tools/roots.sh
. tests/tools/roots.sh
# shellcheck source=tests/tools/deploy_part.sh
. tests/tools/deploy_part.sh
# shellcheck source=tests/tools/podman.sh
. tests/tools/podman.sh
place="$roots/first-round"

step() { # WHAT COMMAND...
  local what=$1 began_s=$SECONDS
  shift
  "$@" >"$place/log" 2>&1 || {
    tail -30 "$place/log" >&2
    echo "FAILED: $part, $what" >&2
    exit 1
  }
  printf '%5d s  %s\n' $((SECONDS - began_s)) "$what"
}

if [[ -z "${GRADBUS_IN_NAMESPACE:-}" ]]; then
  needs "debootstrap buildah podman runc iptables unshare" "debootstrap buildah podman runc netavark aardvark-dns catatonit iptables"
  needs_roots 10
  needs_namespaces "$place"
  root="$roots/bookworm-image"
  if [[ ! -e "$root/ready" ]]; then
    make_root bookworm-image bookworm ca-certificates
    touch "$root/ready"
  fi
  needs_compose "$roots/compose"
  trap 'umount "$place/storage/overlay" 2>/dev/null || true; rm -rf "$place"' EXIT
  podman_in "$place"
  torch=()
  if [[ -n "${TORCH_WHEEL:-}" ]]; then
    version=$(basename "$TORCH_WHEEL" | cut -d- -f2)
    grep -vE '^(torch|torchvision|triton|cuda-[a-z-]+|nvidia-[a-z0-9-]+)==' constraints.txt >"$place/constraints.txt"
    echo "torch==$version" >>"$place/constraints.txt"
    echo 'find-links = ["/run/wheels"]' >"$place/uv.toml"
    torch=(-v "$(dirname "$(realpath "$TORCH_WHEEL")"):/run/wheels:ro" -v "$place/constraints.txt:/src/constraints.txt:ro"
      -v "$place/uv.toml:/etc/uv/uv.toml:ro" --build-arg TORCH=)
  fi
  step "a base image of a root of Debian 12, in place of a pull" base_image "$root"
  step "podman build --target full -t gradbus" build_image full localhost/gradbus "${torch[@]}"
  GRADBUS_IN_NAMESPACE=1 unshare --mount --net --pid --mount-proc --fork --kill-child "$0"
  exit
fi

ip link set lo up
own_run_folder
cp -r deploy "$place/deploy"
cd "$place"
mkdir -m 700 deploy/secrets
chown 10001:10001 deploy/secrets
keys() { podman run --rm --network none -v "$place/deploy/secrets:/secrets" -w /secrets localhost/gradbus keys "$@"; }
step "keys new job.key" keys new job.key
step "keys tls controller" keys tls controller
compose() { podman-compose -f deploy/compose.yaml "$@"; }
# Not a pipe, as the log goes on.
first_round() { grep -m1 "round done" < <(timeout 600 podman logs -f deploy_controller_1 2>&1); }
step "podman-compose up -d" compose up -d --no-deps controller client-1 client-2
step "the first round is done" first_round
step "all 10 rounds are done, and the controller has ended with 0" test "$(podman wait deploy_controller_1)" = 0
step "podman-compose down" compose down -v
echo "image: $(podman image inspect --format '{{.Size}}' localhost/gradbus | awk '{printf "%.0f MB", $1 / 1e6}'), $(podman run --rm --network none localhost/gradbus --version)"
# Not loaded: beside TORCH_WHEEL, torchvision is of a build for CUDA. gradbus loads it for data sets alone.
versions='import torch; from importlib.metadata import version; print("torch", torch.__version__, "torchvision", version("torchvision"))'
podman run --rm --network none --entrypoint python3 localhost/gradbus -c "$versions"
podman run --rm --network none localhost/gradbus doctor | tail -3
