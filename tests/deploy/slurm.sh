#!/usr/bin/env bash
# slurm.sh: runs the batch scripts of deploy/slurm under a slurmctld and three slurmds of its own, which are in namespaces of the kernel as if on a machine each.
#
# Daemons, jobs, links and mounts are gone with the namespaces, and files with their temporary folder. BIN: where gradbus is, by default .venv/bin.
set -euo pipefail
part=slurm
not_run() {
  echo "NOT RUN: $part, $1"
  exit 77
}
[[ "$(id -u)" == 0 ]] || not_run "slurmd and its nodes need root"
unshare --mount --net --uts --ipc --pid --mount-proc --fork --kill-child true 2>/dev/null || not_run "this machine makes no namespaces"
programs=(slurmctld slurmd munged srun)
has_all() { for program in "${programs[@]}"; do command -v "$program" >/dev/null || return 1; done; }
if ! has_all; then
  packages=(slurmctld slurmd slurm-client munge)
  command -v apt-get >/dev/null || not_run "there is no Slurm, and no apt-get to install ${packages[*]}"
  { apt-get -qq -o DPkg::Lock::Timeout=300 update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 \
    install --no-install-recommends "${packages[@]}"; } >/dev/null 2>&1 || not_run "apt-get could not install ${packages[*]}"
  has_all || not_run "${programs[*]} are not all on PATH"
fi

bin=$(realpath "${BIN:-.venv/bin}")
place=$(mktemp -d -t gradbus-slurm-XXXXXX)
clean_up() {
  local code=$?
  ((code == 0)) || tail -n 30 "$place"/jobs/*/gradbus-*.out "$place"/jobs/*/slurmctld.log 2>/dev/null | cut -c1-400 >&2 || true
  rm -rf "$place"
}
trap clean_up EXIT
chmod 755 "$place" # munged wants its folder to be open
# The shell stays as the first process there, and takes those whose parents have ended.
# shellcheck disable=SC2016 # the shell inside expands these
BIN=$bin PYTHONPATH=tests/deploy/slurm unshare --mount --net --uts --ipc --pid --mount-proc --fork --kill-child --propagation private bash -euc '
  ip link set lo up
  "$@" || exit
' bash "$bin/pytest" -n 0 -q -s -p no:cacheprovider --basetemp "$place/jobs" tests/deploy/slurm/batch_jobs.py
