#!/bin/sh
# Run benchmarks/gpu on a GPU machine without a network, from a checkout and the bundle of
# `make gpu-bundle` (docs/guide/gpu.md). Nothing is installed into the machine's Python: the wheels are
# unpacked into a folder on PYTHONPATH.
#
#   scripts/gpu.sh first              check machine, packages and kernels; at most 150 s
#   scripts/gpu.sh second             check the promises: memory, recovery, speed; at most 440 s
#   scripts/gpu.sh table              print the table of the results so far
#   scripts/gpu.sh PART ... OPTION ...   run parts, as `python -m benchmarks.gpu` does
#   scripts/gpu.sh python ...         run the machine's Python with the bundle's packages
#
#   OUT      folder of the results            gpu-results
#   BUNDLE   the bundle                       dist/gpu-bundle
#   SITE     where its wheels are unpacked    /tmp/ullage-gpu
#   PYTHON   the machine's Python             python3
#
# Exit status: that of the programme; 2 if the bundle is missing or for another Python.
set -eu

cd "$(dirname "$0")/.."
OUT=${OUT:-gpu-results}
BUNDLE=${BUNDLE:-dist/gpu-bundle}
SITE=${SITE:-/tmp/ullage-gpu}
PYTHON=${PYTHON:-python3}

fail() {
    echo "error: $1" >&2
    exit 2
}

check() {
    [ -f "$BUNDLE/manifest.json" ] ||
        fail "$BUNDLE has no manifest.json: run make gpu-bundle where there is a network, and bring that folder"

    wanted=$("$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["python"])' \
        "$BUNDLE/manifest.json")
    found=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [ "$wanted" = "$found" ] ||
        fail "$BUNDLE is for Python $wanted, $PYTHON is $found: make gpu-bundle ARGS=\"--python $found\", or set PYTHON"
}

# The manifest is copied last: an interrupted installation is repeated.
install() {
    if cmp -s "$BUNDLE/manifest.json" "$SITE/manifest.json"; then
        return
    fi
    echo "unpack the bundle's wheels into $SITE ..." >&2
    rm -rf "$SITE"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --target "$SITE" "$BUNDLE"/wheels/*.whl >&2
    cp "$BUNDLE/manifest.json" "$SITE/manifest.json"
}

call=${1:-}
[ -n "$call" ] || fail "say first, second, table, python or names of parts; the head of $0 explains them"

check
install
export PYTHONPATH="$SITE"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton}"

# Kernels that another machine has compiled; a run with --pack writes this file.
if [ -f "$BUNDLE/triton-cache.tar.gz" ] && [ ! -d "$TRITON_CACHE_DIR" ]; then
    mkdir -p "$TRITON_CACHE_DIR"
    tar xzf "$BUNDLE/triton-cache.tar.gz" -C "$TRITON_CACHE_DIR"
fi

case $call in
    table) exec "$PYTHON" -m benchmarks.gpu table "$OUT/results.jsonl" ;;
    python)
        shift
        exec "$PYTHON" "$@"
        ;;
    *) exec "$PYTHON" -m benchmarks.gpu --out "$OUT" --bundle "$BUNDLE" "$@" ;;
esac
