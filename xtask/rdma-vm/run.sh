#!/usr/bin/env bash
# Runs one command in a throw-away VM that has soft-RoCE devices, for programs that use libibverbs
# on machines with neither an RDMA NIC nor a kernel with rdma_rxe. The VM is Debian's stock kernel
# in QEMU with an initramfs made on the spot. Needs no root.
#
# Usage: run.sh [option]... [--] COMMAND [ARG]...      (or cargo xtask rdma-vm ...)
#   COMMAND      run in the VM; a program of this host (a path, or a name in PATH) is carried along
#                with the shared libraries that ldd names; busybox applets are there anyway. It has
#                this shell's working folder (made, empty), no standard input, and no environment
#                but what -e names.
#   -f SRC[:DST] carry a file or folder too (DST: SRC's own absolute path; ELF programs bring their
#                libraries; a bare name is looked up in PATH)
#   -s DIR[:DST] mount DIR of the host, read-write, over virtio-9p; `-s /` is special: the host's
#                whole file system, read-only below a RAM overlay, becomes the VM's root (for
#                commands that need more than their libraries, as python3 does)
#   -e VAR=VALUE set an environment variable for COMMAND (VAR alone: with this shell's value)
#   -m MIB       memory (512)         -c N   virtual CPUs (all of this machine's, at most 4)
#   -t SECONDS   time limit (120)     -a A   accelerator: kvm, tcg or auto (auto)
#   -v           copy the VM's console (kernel log) to standard error
# Exit status: COMMAND's own; 124: time limit; 125: the VM failed (its console is then shown).
# COMMAND's standard output and error both come out on standard output.
#
# The VM has rxe0 on veth0 (10.99.0.1) and rxe1 on veth1 (10.99.0.2), the two ends of one link:
# what they exchange are real RoCEv2 packets. GID index 1 is the IPv4-mapped one. To lose packets:
# `tc qdisc add dev veth0 root netem loss 1%`; to lose a host: `netem loss 100%` (a link that is set
# down loses its routes).
#
# All the tests of a crate in VMs:
#   CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER='xtask/rdma-vm/run.sh -e RUST_BACKTRACE' cargo test ...
# with the absolute path of this file. The kernel is kept in $RDMA_VM_CACHE, else in target/rdma-vm.
set -euo pipefail

here=$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")
memory=512 limit=120 accel=auto verbose=
cpus=$(nproc)
files=() shares=() vars=()
((cpus <= 4)) || cpus=4
usage() {
    sed -n '/^# Usage/,/^# COMMAND/s/^# \{0,1\}//p' "$here/run.sh" >&2
    exit 125
}
die() {
    echo "rdma-vm: $*" >&2
    exit 125
}
while getopts 'f:s:e:m:c:t:a:vh' option; do
    case $option in
    f) files+=("$OPTARG") ;;
    s) shares+=("$OPTARG") ;;
    e) vars+=("$OPTARG") ;;
    m) memory=$OPTARG ;;
    c) cpus=$OPTARG ;;
    t) limit=$OPTARG ;;
    a) accel=$OPTARG ;;
    v) verbose=yes ;;
    *) usage ;;
    esac
done
shift $((OPTIND - 1))
(($#)) || usage

[ "$(uname -m)" = x86_64 ] || die "the VM is an x86-64 one and this machine is not"
missing=$("$here/packages.sh" vm | paste -sd' ')
[ -z "$missing" ] || die "missing here: apt-get install --no-install-recommends $missing"
PATH=$PATH:/sbin:/usr/sbin
cache=${RDMA_VM_CACHE:-$here/../../target/rdma-vm}
"$here/kernel.sh" "$cache"
release=$(<"$cache/release")
work=$(mktemp -d)
qemu=
trap '[[ -z $qemu ]] || kill "$qemu" 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- initramfs ----------------------------------------------------------------------------------
root=$work/root
mkdir -p "$root"/{usr/{bin,sbin,lib,lib64},etc/libibverbs.d,proc,sys,dev,tmp,run,root,rdma-vm/modules}
for folder in bin sbin lib lib64; do ln -s usr/$folder "$root/$folder"; done

carry() { # carry SRC [DST]: copies a file or folder; an ELF program's libraries come along
    local src=$1 dst=${2:-} library
    [[ -e $src ]] || src=$(command -v -- "$1") || die "no file or program $1"
    [[ -n $dst ]] || dst=$(realpath -s -- "$src")
    mkdir -p "$root$(dirname "$dst")"
    [[ -e $root$dst && ! -d $src ]] || cp -aLT -- "$src" "$root$dst"
    [[ -f $src ]] || return 0
    # ldd prints "name => /path (0x..)" or "/path (0x..)" and fails on what is not dynamic ELF.
    { ldd -- "$(realpath -- "$src")" 2>/dev/null | grep -o '/[^ ]*' || true; } |
        while read -r library; do
            [[ -e $root$library ]] || {
                mkdir -p "$root$(dirname "$library")"
                cp -aL -- "$library" "$root$library"
            }
        done
}

carry "$(command -v busybox)" /usr/bin/busybox
# A real shell: busybox's own prefers its applets (its `ip` knows no veth) to programs.
carry /bin/dash /usr/bin/sh
for tool in ip rdma tc; do carry "$(command -v $tool)" "/usr/bin/$tool"; done
# libibverbs opens its providers by name at run time, so ldd cannot see them.
for file in /usr/lib/x86_64-linux-gnu/lib{ibverbs,rdmacm}.so.1 \
    /usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav*.so /etc/libibverbs.d/rxe.driver; do
    carry "$file"
done
echo root:x:0:0:root:/root:/bin/sh >"$root/etc/passwd"
echo 127.0.0.1 localhost >"$root/etc/hosts"
cp -- "$here/init.sh" "$root/init"
chmod 755 "$root/init"

# Modules in the order to load them, dependencies first. rxe asks the crypto layer for "crc32" by
# name, which is no dependency that modprobe could show.
modules="virtio_pci virtio_console 9pnet_virtio 9p overlay crc32_generic veth rdma_rxe
    rdma_ucm sch_netem"
n=100
for module in $(for name in $modules; do
    modprobe -d "$cache" -S "$release" --show-depends "$name" | awk '$1 == "insmod" { print $2 }'
done | awk '!seen[$0]++'); do
    cp -- "$module" "$root/rdma-vm/modules/$((n++))-${module##*/}"
done

quote() { # quote WORD...: for a shell to read
    local word
    for word; do printf " '%s'" "${word//\'/\'\\\'\'}"; done
}
applet() { [[ $1 != */* ]] && { [[ -e $root/usr/bin/$1 ]] || busybox --list | grep -qxF -- "$1"; }; }
if ! applet "$1" && program=$(command -v -- "$1") && [[ -f $program ]]; then
    carry "$program"
    set -- "$(realpath -s -- "$program")" "${@:2}"
fi
for file in "${files[@]}"; do
    if [[ $file == *:* ]]; then carry "${file%:*}" "${file##*:}"; else carry "$file"; fi
done
{
    echo "export PATH=/usr/bin:/usr/sbin:/bin:/sbin HOME=/root"
    for var in "${vars[@]}"; do
        # One that is not set here stays unset there.
        if [[ $var != *=* ]]; then
            [[ -v $var ]] || continue
            var="$var=${!var}"
        fi
        echo "export ${var%%=*}=$(quote "${var#*=}" | tail -c +2)"
    done
    echo "mkdir -p$(quote "$PWD"); cd$(quote "$PWD")"
    echo "exec$(quote "$@")"
} >"$root/rdma-vm/command"

share_args=() i=0
: >"$root/rdma-vm/shares"
for share in "${shares[@]}"; do
    from=$(realpath -- "${share%%:*}") to=$(realpath -m -- "${share##*:}") only=
    [[ -d $from ]] || die "-s: no folder $from"
    [[ $share != / ]] || only=,readonly=on
    share_args+=(-fsdev "local,id=fs$i,path=$from,security_model=none,multidevs=remap$only"
        -device "virtio-9p-pci,fsdev=fs$i,mount_tag=share$i")
    echo "share$((i++)) $to" >>"$root/rdma-vm/shares"
done
# Not compressed: unpacking costs an emulated CPU more than reading does.
(cd "$root" && find . | cpio -o -H newc -R 0:0 --quiet) >"$work/initrd"

# --- run ----------------------------------------------------------------------------------------
acceleration=(-accel 'tcg,thread=multi')
case $accel in
auto)
    # A /dev/kvm proves nothing: without vmx or svm it may be one that cannot boot this kernel.
    if [[ -w /dev/kvm ]] && grep -qwE 'vmx|svm' /proc/cpuinfo; then
        acceleration=(-accel kvm "${acceleration[@]}")
    fi
    ;;
tcg) ;;
*) acceleration=(-accel "$accel") ;;
esac
console=$work/console
: >"$console"
if [[ $verbose ]]; then
    tail -f "$console" >&2 &
    tail=$!
fi
# The output comes through a pipe: QEMU's stdio backend would stop at the end of standard input.
# The second cat takes what is left when nobody reads our standard output any more.
mkfifo "$work/output"
{ cat || cat >/dev/null; } <"$work/output" &
reader=$!
code=0
timeout -k 5 "$limit" qemu-system-x86_64 "${acceleration[@]}" -cpu max -m "$memory" -smp "$cpus" \
    -nodefaults -no-user-config -display none -no-reboot \
    -kernel "$cache/boot/vmlinuz-$release" -initrd "$work/initrd" \
    -append "console=ttyS0 panic=-1 quiet loglevel=5 random.trust_cpu=on" \
    -serial "file:$console" -device virtio-rng-pci -device virtio-serial-pci \
    -chardev "file,id=output,path=$work/output" \
    -device virtserialport,chardev=output,name=output,nr=1 \
    -chardev "file,id=status,path=$work/status" \
    -device virtserialport,chardev=status,name=status,nr=2 \
    "${share_args[@]}" </dev/null &
qemu=$!
wait "$qemu" || code=$?
qemu=
exec 3<>"$work/output" 3>&- # lets go a reader that QEMU never came to write for
wait "$reader" || true
if [[ $verbose ]]; then
    sleep 0.2
    kill "$tail"
fi
if ((code == 124 || code == 137)); then
    echo "rdma-vm: no end after $limit s; the VM's console:" >&2
    tail -n 40 "$console" >&2
    exit 124
fi
status=$(tr -d '\r\n' <"$work/status" 2>/dev/null || true)
if [[ ! $status =~ ^[0-9]+$ ]]; then
    echo "rdma-vm: the VM ended (QEMU: $code) before the command did; its console:" >&2
    tail -n 60 "$console" >&2
    exit 125
fi
exit "$status"
