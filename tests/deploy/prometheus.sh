#!/usr/bin/env bash
# prometheus.sh: Debian's Prometheus with deploy/prometheus scrapes a controller and a client that train, in a network namespace of its own.
#
# Each query of the Grafana dashboard returns data, and the alert about a target that is down fires after the client is killed. BIN: where gradbus is.
set -euo pipefail
part=prometheus
# shellcheck source=tests/tools/deploy_part.sh
. tests/tools/deploy_part.sh
if [[ -z "${GRADBUS_IN_NAMESPACE:-}" ]]; then
  [[ $EUID == 0 ]] || not_run "a network namespace is made by root"
  needs "prometheus promtool unshare" prometheus
  unshare -n true || not_run "this machine makes no network namespace"
  GRADBUS_IN_NAMESPACE=1 exec unshare -n "$0"
fi
ip link set lo up
bin=${BIN:-.venv/bin}
place=$(mktemp -d -t gradbus-prometheus-XXXXXX)
started=()
clean_up() {
  for process in "${started[@]}"; do kill -9 "$process" 2>/dev/null || true; done
  wait
  rm -rf "$place"
}
trap clean_up EXIT

promtool check config --syntax-only deploy/prometheus/prometheus.yml
promtool check rules deploy/prometheus/alerts.yml
promtool test rules deploy/prometheus/alerts_test.yml

# The shipped files, with shorter intervals.
sed 's/: 15s$/: 1s/' deploy/prometheus/prometheus.yml >"$place/prometheus.yml"
sed 's/for: 1m$/for: 2s/' deploy/prometheus/alerts.yml >"$place/alerts.yml"
cat >"$place/controller.json" <<'END'
{"bus": {"job": "cells"},
 "task": {"model": "gradbus.models:mnist_mlp", "data": "glyphs", "data_options": {"train": 400, "test": 40}, "threads": 1},
 "federated": {"rounds": 1000000, "clients": {"num": 1}, "training": {"subset_size": 64}}}
END
cat >"$place/client.json" <<'END'
{"bus": {"job": "cells"},
 "task": {"model": "gradbus.models:mnist_mlp", "data": "glyphs", "data_options": {"train": 400, "test": 40}, "threads": 1}}
END
"$bin/gradbus" keys new "$place/job.key" >/dev/null
export GRADBUS_KEY_FILE="$place/job.key"
"$bin/gradbus" controller "$place/controller.json" --run-dir "$place/run" --metrics-port 9100 --no-live >"$place/controller.log" 2>&1 &
started+=($!)
"$bin/gradbus" client "$place/client.json" --name site-1 --metrics-port 9101 >"$place/client.log" 2>&1 &
client=$!
started+=("$client")
prometheus --config.file="$place/prometheus.yml" --storage.tsdb.path="$place/data" --web.listen-address=127.0.0.1:9090 >"$place/prometheus.log" 2>&1 &
started+=($!)
"$bin/python" -P tests/deploy/prometheus_queries.py dashboard deploy/grafana/gradbus.json || {
  tail -n 5 "$place"/*.log >&2
  exit 1
}
kill -9 "$client"
"$bin/python" -P tests/deploy/prometheus_queries.py alert GradbusTargetDown role=client
echo "prometheus: each query of the dashboard returns data, and the alert fires after the client is killed"
