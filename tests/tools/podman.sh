# podman.sh: settings of podman for tests of deploy/, which source this. Not a program of its own.
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
