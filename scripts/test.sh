#!/usr/bin/env bash
# Runs all tests: those that mostly wait beside those that only compute, then, by themselves, those
# that do both and have deadlines. What fails is run once more with nothing beside it, so that a
# busy moment of the machine is told from a fault; a test that fails twice fails the run.
# With arguments: pytest with these, and nothing else.
#
# usage: scripts/test.sh PYTHON [pytest argument ...]
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi

talking=(tests/router tests/proto tests/engine/server)
operating=(tests/operator tests/kubeapi tests/charts)
alone=(tests/e2e tests/engine/worker tests/engine/parallel)
ignored=("${talking[@]/#/--ignore=}" "${operating[@]/#/--ignore=}" "${alone[@]/#/--ignore=}")

logs=$(mktemp -d)
failed=0

# lane NAME PYTEST-ARGUMENT ...: one run of pytest, which notes in $logs/NAME what failed.
lane() {
    "$python" -m pytest -o cache_dir="$logs/$1" "${@:2}"
}

# once_more NAME STATUS PYTEST-ARGUMENT ...: what failed in the lane, by itself.
once_more() {
    [ "$2" = 0 ] && return
    if [ "$2" != 1 ]; then # pytest itself broke off, and has no list of what failed
        failed=1
        return
    fi
    echo "the tests that failed in the lane '$1', once more:"
    lane "$1" --last-failed --last-failed-no-failures none "${@:3}" || failed=1
}

lane talking "${talking[@]}" > "$logs/talking.log" 2>&1 &
talks=$!
lane operating "${operating[@]}" > "$logs/operating.log" 2>&1 &
operates=$!
trap 'kill "$talks" "$operates" 2> /dev/null; rm -rf "$logs"' EXIT

echo "tests that compute, and beside them tests that wait:"
lane computing "${ignored[@]}"
computing=$?
wait "$talks"
talking_status=$?
wait "$operates"
operating_status=$?
cat "$logs/talking.log" "$logs/operating.log"
echo "tests of whole services and groups of processes:"
lane alone "${alone[@]}"
alone_status=$?

once_more computing "$computing" "${ignored[@]}"
once_more talking "$talking_status" "${talking[@]}"
once_more operating "$operating_status" "${operating[@]}"
once_more alone "$alone_status" "${alone[@]}"
exit "$failed"
