#!/usr/bin/env bash
# mpi.sh: four ranks under a real mpirun, with no word of rank and world: all finish with the same weights, and an error of theirs is mpirun's exit code.
set -euo pipefail
part=mpi
# shellcheck source=tests/tools/deploy_part.sh
. tests/tools/deploy_part.sh
needs mpirun openmpi-bin
mpirun --version | grep -q "Open MPI" || not_run "mpirun on PATH is not that of Open MPI"

bin=$(realpath "${BIN:-.venv/bin}")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
cat >ddp.json <<'END'
{"task": {"model": "gradbus.models:mnist_mlp", "data": "glyphs", "data_options": {"train": 2000, "test": 200}, "batch_size": 32},
 "parallel": {"epochs": 1}}
END
options=(--oversubscribe --bind-to none -n 4)
[[ $EUID != 0 ]] || options+=(--allow-run-as-root)
launch() { timeout 180 mpirun "${options[@]}" "$bin/gradbus" worker ddp.json --set "bus.job=mpi-$$" "$@"; }

launch --run-dir run >out 2>&1 || { cat out >&2 && exit 1; }
grep -q '"world": 4' run/summary.json
ranks=(run/state/rank-*)
[[ ${#ranks[@]} == 4 ]]

code=0
launch --world 3 >out 2>&1 || code=$?
if [[ $code != 2 ]] || ! grep -q "rank must be 0 to 2" out; then
  cat out >&2
  exit 1
fi
echo "mpi: 4 ranks of mpirun trained one epoch; a wrong world ended with exit code 2"
