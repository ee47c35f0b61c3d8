#!/usr/bin/env bash
# Rehearses the GPU programme without a GPU, as it will run: from a clean clone of the last commit
# and the bundle alone, without a network but for loopback, in tiny sizes on the CPU. Whoever
# changes benchmarks/gpu or what it needs rehearses it again, with the Python of a GPU machine, too
# (docs/gpu.md says how to make such an environment).
#
#   scripts/gpu_rehearsal.sh                      with .venv/bin/python
#   scripts/gpu_rehearsal.sh /tmp/py312/bin/python
#   scripts/gpu_rehearsal.sh PYTHON PART ...      some parts, by name, in place of both calls
#
# The bundle is made first where it is missing or old, by .venv/bin/python (BUILDER names another).
# Results stay in dist/gpu-rehearsal-VERSION.
#
# Exit status: 0 all passed, 1 something did not, 2 it could not begin, 130 interrupted.
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
[[ -z $(git status --porcelain) ]] || echo "note: what is not committed is not rehearsed" >&2

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone --quiet --no-hardlinks . "$folder/checkout"
mkdir -p "$folder/checkout/dist" "$folder/home"
cp -r "$bundle" "$folder/checkout/dist/gpu-bundle"

# offline COMMAND ...: with loopback alone, none of this checkout's packages and no one's caches
offline() {
    local users=()
    [[ $(id -u) == 0 ]] || users=(--map-root-user)
    env -u PYTHONPATH HOME="$folder/home" PYTHON="$python" PYTHONNOUSERSITE=1 \
        SITE="$folder/site" OUT="$folder/results" TRITON_CACHE_DIR="$folder/triton" \
        unshare --net "${users[@]}" sh -c 'ip link set lo up && exec "$@"' sh "$@"
}

# timed NAME COMMAND ...: prints the seconds; a failure is remembered, and the next goes on
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
# Tokens of tiny models take the place of those of the full size.
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
