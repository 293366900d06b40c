#!/bin/sh
# Whether the VM keeps what run.sh promises. Prints what a Rust test program prints, and takes the
# arguments of one without minding them.
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
here=$(dirname "$0")
passed=0 failed=0

check() { # check NAME: runs the function of that name as a test
    if "$1" >"$out/output" 2>&1; then
        passed=$((passed + 1))
        echo "test vm::$1 ... ok"
    else
        failed=$((failed + 1))
        echo "test vm::$1 ... FAILED"
        cat "$out/output"
    fi
}

devices_are_active() {
    for d in 0 1; do
        state=$(cat /sys/class/infiniband/rxe$d/ports/1/state)
        echo "rxe$d: $state"
        [ "$state" = "4: ACTIVE" ] || return 1
    done
}

gid_1_is_the_ipv4_mapped_one() {
    for d in 0 1; do
        gid=$(cat /sys/class/infiniband/rxe$d/ports/1/gids/1)
        echo "rxe$d: $gid"
        [ "$gid" = "0000:0000:0000:0000:0000:ffff:0a63:000$((d + 1))" ] || return 1
    done
}

memory_may_be_pinned() {
    # shellcheck disable=SC3045 # dash has -l
    [ "$(ulimit -l)" = unlimited ]
}

packets() { cat /sys/class/net/veth1/statistics/tx_packets; }

writes_are_packets_on_the_link() {
    before=$(packets)
    sh "$here/bandwidth.sh" 1 5 || return
    sent=$(($(packets) - before))
    echo "$sent packets"
    [ $sent -ge 1280 ] # 5 MiB in packets of at most 4096 bytes
}

under() { # under NETEM...: the sequence numbers of answers to 100 pings, in the order they come in
    tc qdisc add dev veth0 root netem "$@" || return
    ping -c 100 -i 0.01 -W 2 -I 10.99.0.1 10.99.0.2 >"$out/pings"
    tc qdisc del dev veth0 root
    sed -n 's/.*seq=\([0-9]*\) .*/\1/p' "$out/pings" >"$out/answers"
    wc -l <"$out/answers"
}

a_clean_link_loses_nothing() { [ "$(under loss 0%)" = 100 ]; }

netem_loses_some() {
    answers=$(under loss 30%)
    echo "$answers answers of 100"
    [ "$answers" -ge 40 ] && [ "$answers" -lt 95 ]
}

netem_loses_all() { [ "$(under loss 100%)" = 0 ]; }

netem_duplicates() {
    under duplicate 100%
    sort "$out/answers" | uniq -d | grep -q .
}

netem_reorders() {
    under delay 200ms reorder 50%
    grep -q . "$out/answers" && ! sort -n -c "$out/answers"
}

for test in devices_are_active gid_1_is_the_ipv4_mapped_one memory_may_be_pinned \
    writes_are_packets_on_the_link a_clean_link_loses_nothing netem_loses_some netem_loses_all \
    netem_duplicates netem_reorders; do
    check $test
done
verdict=ok
[ $failed = 0 ] || verdict=FAILED
echo
echo "test result: $verdict. $passed passed; $failed failed; 0 ignored; 0 measured; 0 filtered out"
[ $failed = 0 ]
