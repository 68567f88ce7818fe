# deploy_part.sh: for the parts in tests/deploy, which source it and set `part`, their name. Not a program of its own.
# shellcheck shell=bash

not_run() { # REASON: ends the part. What a part needs and cannot have is no failure; a program that is there and fails is one.
  # shellcheck disable=SC2154 # the part sets it
  echo "NOT RUN: $part, $1"
  exit 77
}
needs() { # "PROGRAM..." "PACKAGE...": installs Debian's packages where a program is missing and this user can
  local programs packages missing=() program log
  read -ra programs <<<"$1"
  read -ra packages <<<"$2"
  for program in "${programs[@]}"; do command -v "$program" >/dev/null || missing+=("$program"); done
  ((${#missing[@]})) || return 0
  if [[ $EUID != 0 ]] || ! command -v apt-get >/dev/null; then
    not_run "there is no ${missing[*]} on PATH (Debian: apt-get install ${packages[*]})"
  fi
  log=$(mktemp)
  {
    timeout 120 apt-get -qq -o DPkg::Lock::Timeout=100 update &&
      DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -y -o DPkg::Lock::Timeout=100 install --no-install-recommends "${packages[@]}"
  } >"$log" 2>&1 || not_run "apt-get could not install ${packages[*]}: $(tail -1 "$log")"
  rm "$log"
}
needs_namespaces() { # FOLDER: namespaces of mounts, networks and processes, and overlays in FOLDER. Containers are made of these.
  local place
  [[ $EUID == 0 ]] || not_run "containers are started by root here"
  mkdir -p "$1"
  place=$(mktemp -d -p "$1")
  # shellcheck disable=SC2016 # the shell inside expands it
  unshare --mount --net --pid --fork sh -euc '
    mkdir "$1/lower" "$1/upper" "$1/work" "$1/merged"
    mount -t overlay overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$1/work" "$1/merged"
  ' sh "$place" 2>"$place/error" || {
    local error
    error=$(head -1 "$place/error")
    rm -rf "$place"
    not_run "this machine makes no namespaces, or mounts no overlay in $1: $error"
  }
  rm -rf "$place"
}
