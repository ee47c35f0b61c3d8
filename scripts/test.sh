#!/usr/bin/env bash
# Runs all tests: those that mostly wait beside those that only compute, then, by themselves, those
# that do both and have deadlines. With arguments: pytest with these, and nothing else.
#
# usage: scripts/test.sh PYTHON [pytest argument ...]
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi

waiting=(tests/router tests/operator tests/kubeapi tests/charts tests/proto tests/engine/server)
alone=(tests/e2e tests/engine/worker tests/engine/parallel)
ignored=("${waiting[@]/#/--ignore=}" "${alone[@]/#/--ignore=}")

log=$(mktemp)
"$python" -m pytest -p no:cacheprovider "${waiting[@]}" > "$log" 2>&1 &
beside=$!
trap 'kill "$beside" 2> /dev/null; rm -f "$log"' EXIT

failed=0
echo "tests that compute, and beside them tests that wait:"
"$python" -m pytest "${ignored[@]}" || failed=1
wait "$beside" || failed=1
cat "$log"
echo "tests of whole services and groups of processes:"
"$python" -m pytest "${alone[@]}" || failed=1
exit "$failed"
