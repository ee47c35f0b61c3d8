#!/usr/bin/env bash
# Rehearse the GPU programme on the CPU, in tiny sizes: from a clean clone of the last commit and the
# bundle alone, with no network except loopback. Run this after a change of benchmarks/gpu or of its
# dependencies, also with the Python of a GPU machine (docs/guide/gpu.md describes such an environment).
#
#   scripts/gpu_rehearsal.sh                      with .venv/bin/python
#   scripts/gpu_rehearsal.sh /tmp/py312/bin/python
#   scripts/gpu_rehearsal.sh PYTHON PART ...      parts by name, instead of both calls
#
# A missing or outdated bundle is made first, by .venv/bin/python or by the Python in BUILDER.
# Results stay in dist/gpu-rehearsal-VERSION.
#
# Exit status: 0 all passed, 1 a part failed, 2 it could not begin, 130 interrupted.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "error: $1" >&2
    exit 2
}

python=$(realpath --no-symlinks "${1:-.venv/bin/python}")
parts=("${@:2}")
builder=${BUILDER:-.venv/bin/python}
[[ -x $python ]] || fail "$python is no Python: make install-dev makes .venv/bin/python"
[[ -x $builder ]] || fail "$builder is no Python: make install-dev, or name one in BUILDER"
for tool in unshare ip git; do
    command -v "$tool" > /dev/null || fail "there is no $tool: install util-linux, iproute2 and git"
done

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
bundle=dist/gpu-bundle
[[ $version == 3.12 ]] || bundle=dist/gpu-bundle-$version
"$builder" scripts/gpu_bundle.py --python "$version" --out "$bundle" --keep-oracle
[[ -z $(git status --porcelain) ]] || echo "note: uncommitted changes are not rehearsed" >&2

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone --quiet --no-hardlinks . "$folder/checkout"
mkdir -p "$folder/checkout/dist" "$folder/home"
cp -r "$bundle" "$folder/checkout/dist/gpu-bundle"

# offline COMMAND ...: run with loopback alone, without this checkout's packages and any caches
offline() {
    local users=()
    [[ $(id -u) == 0 ]] || users=(--map-root-user)
    env -u PYTHONPATH HOME="$folder/home" PYTHON="$python" PYTHONNOUSERSITE=1 \
        SITE="$folder/site" OUT="$folder/results" TRITON_CACHE_DIR="$folder/triton" \
        unshare --net "${users[@]}" sh -c 'ip link set lo up && exec "$@"' sh "$@"
}

# timed NAME COMMAND ...: print the seconds; remember a failure, and continue
status=0
timed() {
    local name=$1 began=$SECONDS result=passed
    shift
    offline "$@" || { result=FAILED && status=1; }
    echo "rehearsal, Python $version: $name $result after $((SECONDS - began)) s"
}

cd "$folder/checkout"
tiny=(--tiny --device cpu)
timed "unpack" scripts/gpu.sh python -c 'import ullage_engine, ullage_router; print("unpacked")'
# Tokens of tiny models replace those of full size.
timed "oracle" scripts/gpu.sh python -m benchmarks.gpu oracle "${tiny[@]}" --out dist/gpu-bundle
if ((${#parts[@]})); then
    timed "${parts[*]}" scripts/gpu.sh "${parts[@]}" "${tiny[@]}"
else
    timed "first" scripts/gpu.sh first "${tiny[@]}"
    timed "second" scripts/gpu.sh second "${tiny[@]}"
fi
cd - > /dev/null

kept=dist/gpu-rehearsal-$version
rm -rf "$kept"
[[ ! -d $folder/results ]] || cp -r "$folder/results" "$kept"
echo "rehearsal, Python $version: $([[ $status == 0 ]] && echo all passed || echo NOT all passed), $kept"
exit "$status"
