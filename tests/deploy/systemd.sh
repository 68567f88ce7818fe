#!/usr/bin/env bash
# systemd.sh: a relay, a controller and a client as units of `gradbus service install`, under systemd as PID 1 in a container of podman.
#
# They train one model; then a wrong configuration, SIGTERM and a killed process show what systemd does after each end. All is kept in a temporary
# folder, and all processes are those of the container, which goes at the end. BIN: where gradbus is, by default .venv/bin.
set -euo pipefail
part=systemd
# shellcheck source=tests/tools/roots.sh
. tests/tools/roots.sh
# shellcheck source=tests/tools/deploy_part.sh
. tests/tools/deploy_part.sh
# shellcheck source=tests/tools/podman.sh
. tests/tools/podman.sh
fail() {
  echo "FAILED: $part, $1" >&2
  podman exec "$box" journalctl --no-pager -n 60 2>/dev/null | cut -c1-400 >&2 || true
  exit 1
}
needs "systemd-analyze mmdebstrap podman runc catatonit" "systemd mmdebstrap podman runc netavark catatonit"
needs_namespaces "$roots"
checkout=$PWD
bin=$(realpath "${BIN:-.venv/bin}")
python=$("$bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# shellcheck disable=SC1091
suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")
mirror="${DEBIAN_MIRROR:-$(sed -nE 's/^(URIs:|deb) +(\[.*\] +)?(https?:[^ ]+debian\/?)( .*)?$/\3/p' /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -1 || true)}"

place=$(mktemp -d -t gradbus-systemd-XXXXXX)
box=gradbus-systemd-$$
clean_up() {
  podman rm -f -t 5 "$box" >/dev/null 2>&1 || true
  podman rmi -f "$box" >/dev/null 2>&1 || true
  umount "$place/storage/overlay" 2>/dev/null || true
  rm -rf "$place"
}
trap clean_up EXIT
podman_in "$place"

root="$roots/systemd-$suite.tar"
if [[ ! -e "$root" ]]; then
  mmdebstrap --quiet --variant=minbase --include=systemd-sysv,dbus,python3 "$suite" "$place/root.tar" "${mirror:-http://deb.debian.org/debian}" >"$place/root.log" 2>&1 || {
    tail -5 "$place/root.log"
    not_run "mmdebstrap could not make a root of $suite"
  }
  mv "$place/root.tar" "$root.$$" && mv "$root.$$" "$root"
fi
podman import --quiet --signature-policy /dev/null "$root" "$box" >/dev/null 2>&1 || podman import --quiet "$root" "$box" >/dev/null || fail "podman cannot import an image"
podman run --rm --network none "$box" true 2>"$place/error" || not_run "podman starts no container here: $(tail -1 "$place/error")"

# The interpreter of .venv may lie in the home of root, which services do not see. Debian's own takes its packages, if it is the same version.
site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
podman run -d --name "$box" --systemd=always --network none --cap-add SYS_ADMIN,NET_ADMIN --security-opt seccomp=unconfined --security-opt unmask=ALL \
  -v "$checkout:$checkout:ro" -v "$site:/srv/site:ro" "$box" /sbin/init >/dev/null || fail "podman cannot start a container with systemd"
inside() { podman exec "$box" "$@"; }
wait_until() { # SECONDS WHAT COMMAND...
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    for name in ${needed:-}; do is_property "$name" ActiveState failed && fail "the $name ended while $what was awaited"; done
    ((SECONDS < end)) || fail "waited in vain for: $what"
    sleep 1 # each question starts a process in the container
  done
}
is_booted() { [[ "$(inside systemctl is-system-running 2>/dev/null)" =~ ^(running|degraded)$ ]]; }
wait_until 120 "systemd to have started" is_booted
[[ "$(inside python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" == "$python" ]] || not_run "Debian $suite has another Python than $bin, $python"

# A helper of systemd mounts the credentials of a service, and the service sees them if mounts are shared, as they are on a machine.
inside mount --make-rshared /
# shellcheck disable=SC2016 # the shell in the container expands it
inside sh -euc '
  mkdir -p /etc/gradbus /srv/gradbus
  python3 -m venv --without-pip /srv/gradbus/venv
  echo "import site; site.addsitedir(\"/srv/site\")" >"$(ls -d /srv/gradbus/venv/lib/python*/site-packages)/site.pth"
  printf "#!/srv/gradbus/venv/bin/python\nimport sys\nfrom gradbus.__main__ import main\nsys.exit(main())\n" >/srv/gradbus/venv/bin/gradbus
  chmod 755 /srv/gradbus/venv/bin/gradbus
  ln -s /srv/gradbus/venv/bin/gradbus /usr/local/bin/gradbus
  cd /etc/gradbus
  gradbus keys new job.key
  gradbus keys tls localhost
  chmod 755 tls
' >/dev/null
put() { podman exec -i "$box" sh -c 'cat >"$1" && chmod 644 "$1"' sh "$1"; }
put /etc/gradbus/relay.json <<'END'
{"relay": {"listen": ["tls/127.0.0.1:443"], "tls_certificate": "tls/localhost.pem", "tls_key": "tls/localhost.key", "drain_s": 1}}
END
bus='{"job": "cells", "connect": ["tls/localhost:443"], "tls_ca": "tls/ca.pem", "key_file": "job.key"}'
task='{"model": "gradbus.models:mnist_mlp", "data": "glyphs", "data_options": {"train": 400, "test": 40}, "threads": 1}'
put /etc/gradbus/controller.json <<END
{"bus": $bus, "task": $task, "federated": {"rounds": 100000, "clients": {"num": 1}, "training": {"subset_size": 64}}}
END
put /etc/gradbus/client.json <<END
{"bus": $bus, "task": $task, "client": {}}
END
install() { podman exec -w /etc/gradbus "$box" gradbus service install "$@"; }
property() { inside systemctl show --value -p "$2" "gradbus-$1"; }
is_property() { [[ "$(property "$1" "$2")" == "$3" ]]; }
rounds() { inside sh -c 'wc -l </var/lib/private/gradbus-controller/rounds.jsonl' 2>/dev/null || echo 0; }
has_rounds() { (($(rounds) >= $1)); }

install relay.json >/dev/null 2>&1 || fail "the unit of the relay was not installed"
install controller.json >/dev/null 2>&1 || fail "the unit of the controller was not installed"
install client.json --name site-1 >/dev/null 2>&1 || fail "the unit of the client was not installed"
for role in relay controller client; do
  file=/etc/systemd/system/gradbus-$role.service
  found=$(inside systemd-analyze --man=no verify "$file" 2>&1)
  [[ -z "$found" ]] || fail "systemd-analyze verify says of $file: $found"
  inside systemd-analyze security --offline=true --threshold=30 "$file" >/dev/null || fail "$file leaves the service more than 3.0"
done
inside env HOME=/srv/home sh -c 'cd /etc/gradbus && gradbus service install client.json --name site-2 --user' >/dev/null 2>&1 || fail "no unit for a user was installed"

inside systemctl daemon-reload
inside systemctl enable --quiet --now gradbus-relay gradbus-controller gradbus-client
needed="relay controller client"
wait_until 300 "two rounds" has_rounds 2
for role in relay controller client; do
  [[ "$(inside sh -c "stat -c %u /proc/$(property $role MainPID)")" != 0 ]] || fail "the $role runs as root"
done
[[ "$(inside stat -c %a /var/lib/private/gradbus-controller)" == 700 ]] || fail "others may enter the state of the controller"

needed="relay client"
inside sh -c "kill -9 $(property controller MainPID)"
wait_until 120 "the controller to be started again" is_property controller NRestarts 1
wait_until 300 "rounds after the restart" has_rounds $(($(rounds) + 2))

needed=""
inside systemctl stop gradbus-controller gradbus-client gradbus-relay
for expected in controller:143 client:143 relay:0; do
  role=${expected%:*}
  [[ "$(property "$role" Result) $(property "$role" ExecMainStatus)" == "success ${expected#*:}" ]] ||
    fail "SIGTERM ended the $role with $(property "$role" Result), $(property "$role" ExecMainStatus)"
done

put /etc/gradbus/controller.json <<END
{"bus": $bus, "task": $task, "federated": {"rounds": -1}}
END
said=$(install controller.json 2>&1) && fail "a wrong configuration got a unit"
[[ "$said" == *federated.rounds* ]] || fail "a wrong configuration was refused with: $said"
inside systemctl start gradbus-controller
wait_until 120 "the controller to have failed" is_property controller ActiveState failed
[[ "$(property controller ExecMainStatus) $(property controller NRestarts)" == "2 0" ]] ||
  fail "a wrong configuration ended with $(property controller ExecMainStatus), after $(property controller NRestarts) restarts"

# A program that embeds gradbus, by the unit that is to be copied.
inside sh -c 'mkdir -p /srv/app && ln -s /srv/gradbus/venv /srv/app/venv'
put /srv/app/main.py <<'END'
import asyncio
import os
import sys

import gradbus


async def main() -> None:
    async with gradbus.connect("program", interface=os.environ.get("INTERFACE", "lo"), load_actors=False, security="psk"):
        print("connected as", os.getuid(), flush=True)
        await asyncio.Event().wait()


try:
    asyncio.run(main())
except gradbus.ConfigError as error:
    sys.stderr.write(f"{error}\n")
    sys.exit(2)
END
put /etc/systemd/system/gradbus-program.service <deploy/systemd/gradbus-program.service
found=$(inside systemd-analyze --man=no verify /etc/systemd/system/gradbus-program.service 2>&1)
[[ -z "$found" ]] || fail "systemd-analyze verify says of the program's unit: $found"
inside systemd-analyze security --offline=true --threshold=30 /etc/systemd/system/gradbus-program.service >/dev/null || fail "the program's unit leaves more than 3.0"
inside systemctl daemon-reload
inside systemctl start gradbus-program
is_connected() { inside journalctl -o cat -u gradbus-program | grep -q "connected as [1-9]"; }
wait_until 120 "the program to be connected" is_connected
inside systemctl stop gradbus-program
[[ "$(property program Result)" == success ]] || fail "SIGTERM ended the program with $(property program Result)"
inside mkdir /etc/systemd/system/gradbus-program.service.d
put /etc/systemd/system/gradbus-program.service.d/wrong.conf <<<$'[Service]\nEnvironment=INTERFACE=nowhere7'
inside systemctl daemon-reload
inside systemctl start gradbus-program
wait_until 120 "the program to have failed" is_property program ActiveState failed
[[ "$(property program ExecMainStatus) $(property program NRestarts)" == "2 0" ]] ||
  fail "a wrong setting ended the program with $(property program ExecMainStatus), after $(property program NRestarts) restarts"
echo "systemd: a relay, a controller, a client and a program were run, killed, restarted and stopped"
