#!/usr/bin/env bash
# test_deploy.sh [PART]: runs the tests of what lies in deploy/, for `make test-deploy`. No PART: all of them, one after the other, but those that
# take many minutes and gigabytes, which run only by their name.
#
# A part is an executable tests/deploy/PART.sh. It runs from the root of the checkout and ends with
#   0   when everything that it ran was right; each check that it left out has a line `NOT RUN: PART, reason` on stdout
#   77  when it ran nothing, as a program or a mirror cannot be had: then that line is the reason
# and with anything else when it failed. What a part had to leave out is printed once more at the end.
set -euo pipefail
part="${1:-}"
by_name=(first-round)
limit_s=${LIMIT_S:-1500} # of one part, which first may make its root of Debian
[[ " ${by_name[*]} " != *" $part "* ]] || limit_s=7200

shopt -s nullglob
scripts=(tests/deploy/*.sh)
names=("${scripts[@]##*/}")
names=("${names[@]%.sh}")
if [[ -n "$part" && ! -e "tests/deploy/$part.sh" ]]; then
  echo "make test-deploy: there is no part '$part'. The parts: ${names[*]}; none: all of them" >&2
  exit 2
fi
output=$(mktemp) missing=$(mktemp)
trap 'rm -f "$output" "$missing"' EXIT
# `timeout` makes a process group of its own, which has to be told when this program is to end.
running=
trap '[[ -z "$running" ]] || { { kill -- "-$running" || kill "$running"; } 2>/dev/null && wait; }; exit 143' TERM INT

failed=()
for name in ${part:-"${names[@]}"}; do
  [[ -n "$part" || " ${by_name[*]} " != *" $name "* ]] || continue
  began_s=$SECONDS code=0
  echo "== $name"
  timeout --kill-after=60 "$limit_s" "tests/deploy/$name.sh" </dev/null >"$output" 2>&1 &
  running=$!
  tail --pid="$running" -s 0.2 -n +1 -f "$output" &
  wait "$running" || code=$?
  wait
  grep '^NOT RUN: ' "$output" >>"$missing" || [[ $code != 77 ]] || {
    echo "tests/deploy/$name.sh ended with 77 and gave no line 'NOT RUN: $name, reason'" >&2
    code=1
  }
  case $code in
  0) outcome=green ;;
  77) outcome="not run" ;;
  124 | 137) outcome="not at its end after $limit_s s" ;;
  *) outcome="failed with exit code $code" ;;
  esac
  echo "== $name: $outcome, $((SECONDS - began_s)) s"
  [[ $code == 0 || $code == 77 ]] || failed+=("$name: $outcome")
done
cat "$missing"
((${#failed[@]} == 0)) || {
  printf 'make test-deploy: %s\n' "${failed[@]}" >&2
  exit 1
}
