#!/usr/bin/env bash
# kernel.sh FOLDER: puts Debian's stock kernel and the modules that the VM may need into FOLDER,
# unless they are there. The package comes through apt (70 MB) and is unpacked, not installed.
# FOLDER/release names the kernel. Needs no root.
set -euo pipefail
PATH=$PATH:/sbin:/usr/sbin
folder=$(realpath -m -- "${1:?usage: kernel.sh FOLDER}")
[ ! -e "$folder/release" ] || exit 0

die() {
    echo "rdma-vm: $*" >&2
    exit 125
}
command -v apt-get >/dev/null || die "there is no apt-get to fetch a kernel with: Debian is needed"
mkdir -p "$(dirname "$folder")"
# Beside the folder, so that it appears at once and whole
work=$(mktemp -d -p "$(dirname "$folder")")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"

# As root, apt would drop to a user who may not write here.
apt=(-o APT::Sandbox::User="$(id -un)")
newest() {
    apt-cache "${apt[@]}" depends linux-image-amd64 2>/dev/null |
        awk '/Depends: linux-image/ { print $2; exit }'
}
fetch() {
    package=$(newest)
    [ -n "$package" ] && (cd "$work" && apt-get "${apt[@]}" -q download "$package" >&2)
}
if ! fetch; then
    # The machine's lists are missing or out of date: fetch some of our own, which takes no root.
    mkdir -p "$work"/apt/{lists,archives}/partial
    apt+=(-o Dir::State::lists="$work/apt/lists" -o Dir::Cache="$work/apt"
        -o Dir::Cache::archives="$work/apt/archives")
    apt-get "${apt[@]}" -q -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false update >&2 || die "apt-get update failed"
    [ -n "$(newest)" ] || die "apt knows no linux-image-amd64: this is no Debian on x86-64"
    fetch || die "apt could not fetch a kernel"
fi

release=${package#linux-image-}
tree=$work/tree
mkdir "$tree"
dpkg-deb --fsys-tarfile "$work"/linux-image-*.deb | tar -x -C "$tree" --wildcards \
    './boot/vmlinuz-*' '*/lib/modules/*'
# Debian 13's packages name /usr/lib, and their modules are compressed.
[ ! -d "$tree/usr/lib/modules" ] || mv "$tree/usr/lib" "$tree/lib"
# What can matter in such a VM; all modules are 350 MB.
(cd "$tree/lib/modules/$release/kernel" && find . -name '*.ko*' \
    ! -path './drivers/infiniband/*' ! -path './drivers/virtio/*' ! -path './drivers/block/*' \
    ! -path './drivers/char/*' ! -path './drivers/net/*' ! -path './net/*' ! -path './fs/*' \
    ! -path './lib/*' ! -path './crypto/*' ! -path './arch/*' -delete)
find "$tree/lib" -name '*.ko.xz' -exec xz -d {} +
depmod -b "$tree" "$release"
echo "$release" >"$tree/release"
# Another run may have been faster; then its folder serves as well.
mv -T "$tree" "$folder" 2>/dev/null || [ -e "$folder/release" ] || die "cannot fill $folder"
