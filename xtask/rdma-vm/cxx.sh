#!/bin/sh
# cxx.sh ARG...: the compiler c++, whose answers are kept in $EP_CXX_ANSWERS; where there is no c++, what it
# answered to the same arguments and the same input. So the emulated GPUs find their kernels in the VM.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/in"
to="" all="" before=""
for arg; do
    # Where it is to put what it makes is another place every time.
    if [ "$before" = -o ]; then to=$arg; else all="$all $arg"; fi
    before=$arg
done
key=$({ echo "$all"; cat "$work/in"; } | sha256sum | cut -c-40)
answer=$EP_CXX_ANSWERS/$key

if cxx=$(command -v c++); then
    code=0
    "$cxx" "$@" <"$work/in" >"$work/out" 2>"$work/err" || code=$?
    if [ $code = 0 ]; then
        mkdir -p "$EP_CXX_ANSWERS"
        # Several ask at once: what is there is whole.
        [ -z "$to" ] || { cp "$to" "$answer.$$" && mv "$answer.$$" "$answer.made"; }
        cp "$work/out" "$answer.$$" && mv "$answer.$$" "$answer.out"
    fi
    cat "$work/out"
    cat "$work/err" >&2
    exit $code
fi
if [ ! -e "$answer.out" ]; then
    echo "there is no compiler, and what it said to this was not kept" >&2
    exit 1
fi
[ -z "$to" ] || cp "$answer.made" "$to"
cat "$answer.out"
