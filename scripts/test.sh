#!/usr/bin/env bash
# Run the tests in four parallel lanes, which keep two cores busy although most tests wait: first
# computing tests and then whole services; the router's over sockets; those of the engine's server,
# then checks and load tests of other servers; the operator, then workers and groups of ranks, then
# services that no other test shares, and the benchmarks. Every test runs once, and a failure fails
# the run.
#
#   scripts/test.sh PYTHON                 tests of every change: neither nightly nor slow
#   scripts/test.sh PYTHON nightly         the other tests that are not slow
#   scripts/test.sh PYTHON fast            tests that start no processes, within a minute
#   scripts/test.sh PYTHON slow            tests marked slow, with new examples in each run
#   scripts/test.sh PYTHON ARGUMENT ...    pytest with these arguments
#
# With ULLAGE_TEST_UNTIL, a Unix time, no test begins after that time, and those left out are named.
# With ULLAGE_TEST_ROOMS only these folders of tests/ are run, and the files beside them.
set -uo pipefail
source "$(dirname "$0")/lanes.sh"
cd "$(dirname "$0")/.."
python=$1
shift

engine=tests/engine
fast_operator=(
    tests/test_*.py tests/operator/{api,conditions,manifests,rollout}
    tests/operator/planning/test_plan.py tests/operator/controller/test_rolls.py
    --ignore=tests/operator/api/test_wrong_manifests.py --ignore=tests/test_lanes.py
    --ignore=tests/test_gpu_bundle.py
)
fast_rest=(
    tests/router/policy tests/router/prompts/test_*.py tests/kv/test_{index,keys}.py
    "$engine"/{kv_cache,memory,model_config,parallel,protocol,quantization,scheduler,tokenizer}
)
talking=(tests/router tests/common)
serving=("$engine/server") # measures stalls, so it shares no process with tests that compute
checking=(tests/verify tests/bench)
operating=(tests/operator tests/cli tests/kubeapi tests/charts)
services=(tests/e2e tests/observability)
benchmarks=(tests/benchmarks)
unshared=(tests/e2e/test_{asleep,hybrid}.py)
processes=("$engine/worker/process" "$engine/worker/ranks")
elsewhere=("${talking[@]}" "${serving[@]}" "${checking[@]}" "${operating[@]}" "${services[@]}" "${benchmarks[@]}" "${processes[@]}" tests/vllm)
computing=("${elsewhere[@]/#/--ignore=}")
services+=("${unshared[@]/#/--ignore=}")

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export ULLAGE_TEST_WEIGHTS=$logs/weights # every model is prepared once for all lanes
mkdir "$ULLAGE_TEST_WEIGHTS"
unset PYTHONDONTWRITEBYTECODE # otherwise hundreds of processes compile the same modules

chosen="not slow and not nightly"

# lane NAME PYTEST-ARGUMENT ...: a lane without any test of the chosen kind has passed
lane() {
    local status no_test=5
    "$python" -m pytest -q -m "$chosen" -o cache_dir="$logs/$1" --durations=15 "${@:2}"
    status=$?
    ((status == no_test)) || return "$status"
}

# lanes NAME ...: run the tests of these names, one after another
lanes() {
    local status=0 name
    for name in "$@"; do
        local -n tests=$name
        lane "$name" "${tests[@]}" || status=1
    done
    return "$status"
}

case "${1:-}" in
    "") ;;
    nightly) chosen="nightly and not slow" ;;
    fast)
        start lane operator "${fast_operator[@]}" > "$logs/operator.log" 2>&1
        operator=$!
        start lane rest "${fast_rest[@]}"
        join $!
        status=$?
        join "$operator" || status=1
        cat "$logs/operator.log"
        exit "$status"
        ;;
    slow) "$python" -m pytest -m slow --hypothesis-profile=search; exit ;;
    *) "$python" -m pytest "$@"; exit ;;
esac

start lane talking "${talking[@]}" > "$logs/talking.log" 2>&1
talking_pid=$!
start lanes serving checking > "$logs/serving.log" 2>&1
serving_pid=$!
start lanes operating processes unshared benchmarks > "$logs/operating.log" 2>&1
operating_pid=$!

failed=0
echo "tests that compute:"
start lane computing "${computing[@]}"
join $! || failed=1
echo "tests of whole services:"
start lane services "${services[@]}"
join $! || failed=1
for name in talking serving operating; do
    pid=${name}_pid
    join "${!pid}" || failed=1
    echo "tests of the lane $name:"
    cat "$logs/$name.log"
done
exit "$failed"
