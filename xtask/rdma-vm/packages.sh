#!/usr/bin/env bash
# Prints the Debian packages that the step `rdma` of `cargo xtask test` needs and that are missing
# here, one a line. `packages.sh vm` prints only those that running a program in the VM needs.
set -euo pipefail
PATH=$PATH:/sbin:/usr/sbin
libraries=$(ldconfig -p)

program() { command -v "$1" >/dev/null; }
library() { [[ $libraries == *"$1"* ]]; }
file() { compgen -G "$1" >/dev/null; }

need() { # need PACKAGE TEST ARGUMENT: prints PACKAGE if TEST fails
    "$2" "$3" || echo "$1"
}

need qemu-system-x86 program qemu-system-x86_64
need busybox-static program busybox
need cpio program cpio
need kmod program depmod
need iproute2 program rdma
need ibverbs-providers file /etc/libibverbs.d/rxe.driver
need libibverbs1 library libibverbs.so.1
need librdmacm1 library librdmacm.so.1
[ "${1-}" != vm ] || exit 0

# The crate ibverbs-sys configures rdma-core with cmake, and bindgen reads its headers with libclang.
need cmake program cmake
need make program make
need pkg-config program pkg-config
need libibverbs-dev file /usr/include/infiniband/verbs.h
# The development package brings clang's own headers too, which libclang alone, or libclang-cpp, does not.
[ -n "${LIBCLANG_PATH-}" ] || need libclang-dev file '/usr/lib/llvm-*/lib/libclang.so'
# ib_write_bw, with which the transport's bandwidth is compared
need perftest program ib_write_bw
