#!/usr/bin/env bash
# Run the cluster's tests in parallel lanes, each with a service of its own. They spend most of their
# time waiting for pods that end and for files that kubelets renew. The chart is installed once.
#
#   scripts/e2e.sh PYTHON                 every test
#   scripts/e2e.sh PYTHON ARGUMENT ...    pytest with these arguments, in one lane
set -uo pipefail
source "$(dirname "$0")/lanes.sh"
cd "$(dirname "$0")/.."
python=$1
shift

tests=tests/e2e/cluster
if (($#)); then
    exec "$python" -m pytest "$tests" -v "$@"
fi

lanes=(faults rollouts others)
faults=(serving drift faults marathon)
rollouts=(rollout tls)
others=(wrong_manifests lifecycle extensions model_cache image_volume scaling drain)

logs=$(mktemp -d)
export ULLAGE_E2E_NAMESPACE=${ULLAGE_E2E_NAMESPACE:-ullage-e2e-$(date +%s)}

# run NAME FILE ...: run pytest with these test files
run() {
    local files=("${@:2}")
    "$python" -m pytest -v -o cache_dir="$logs/$1" --durations=10 --durations-min=1 \
        "${files[@]/#/$tests/test_}"
}

# Uninstall the chart, even if a step was interrupted.
finish() {
    local status=$?
    echo "permissions and uninstallation:"
    # Into a file, because a closed pipe would end the step.
    ULLAGE_E2E_INSTALLED=1 start run end zero_denials.py > "$logs/end.log" 2>&1
    join $! || ((status)) || status=1
    cat "$logs/end.log"
    rm -rf "$logs"
    exit "$status"
}
trap finish EXIT

echo "the chart:"
ULLAGE_E2E_KEEP=1 start run chart install.py
join $! || exit
export ULLAGE_E2E_INSTALLED=1
failed=0
pids=()
for lane in "${lanes[@]}"; do
    declare -n names=$lane
    ULLAGE_E2E_KEEP=1 ULLAGE_E2E_SERVICE=$lane start run "$lane" "${names[@]/%/.py}" \
        > "$logs/$lane.log" 2>&1
    pids+=($!)
done
for index in "${!lanes[@]}"; do
    join "${pids[index]}" || failed=1
    echo "lane ${lanes[index]}:"
    cat "$logs/${lanes[index]}.log"
done
exit "$failed"
