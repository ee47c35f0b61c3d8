#!/usr/bin/env bash
# Makes the images' base where none can be pulled: Debian 12 with python3.11 and nothing to build
# with, as a tar file. The same mirror gives the same bytes. Needs root and debootstrap.
#
# usage: docker/base.sh TARGET.tar
#   MIRROR, SECURITY   Debian's archives; a day of snapshot.debian.org pins every package
#   SOURCE_DATE_EPOCH  time of all files, in seconds
set -euo pipefail
target=$1
suite=bookworm
mirror=${MIRROR:-http://deb.debian.org/debian}
security=${SECURITY:-http://deb.debian.org/debian-security}
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-0} PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1 LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
umask 022

root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
chmod 755 "$root"

debootstrap --variant=minbase --include=ca-certificates,python3-minimal,libpython3.11-stdlib \
    "$suite" "$root" "$mirror"
cat > "$root/etc/apt/sources.list" <<LIST
deb $mirror $suite main
deb $mirror $suite-updates main
deb $security $suite-security main
LIST
chroot "$root" apt-get -qq -o Acquire::Check-Valid-Until=false update
chroot "$root" apt-get -qq --yes upgrade
chroot "$root" apt-get -qq clean

# What differs from run to run, and what only people read.
cd "$root"
rm -rf var/lib/apt/lists/* var/cache/* var/log/* var/tmp/* tmp/* run/* \
    usr/share/doc/* usr/share/man/* usr/share/locale/* usr/share/info/* \
    etc/machine-id etc/hostname etc/resolv.conf etc/passwd- etc/group- etc/shadow- etc/gshadow- \
    var/lib/dpkg/*-old
mkdir -p var/cache/apt/archives/partial var/lib/apt/lists/partial
# The day of the last change of a password is the day of the build.
sed -i -E 's/^([^:]*:[^:]*):[0-9]*:/\1:0:/' etc/shadow
# Bytecode that does not depend on when a source was written.
find usr -name __pycache__ -prune -exec rm -rf {} +
chroot . python3 -m compileall -qf --invalidation-mode unchecked-hash /usr/lib/python3.11 || true
# (Some files of the standard library's own tests are meant not to compile.)

cd - > /dev/null
mkdir -p "$(dirname "$target")"
tar --create --file "$target" --directory "$root" --sort=name --numeric-owner \
    --mtime="@$SOURCE_DATE_EPOCH" --clamp-mtime --one-file-system \
    --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' .
