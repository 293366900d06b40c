#!/bin/sh
# bandwidth.sh [QPS [WRITES]]: in the VM, what ib_write_bw of perftest measures from rxe1 to rxe0 with
# writes of 1 MiB on QPS queue pairs (4), WRITES on each (16, at least 5). Prints one line:
#   ib_write_bw bytes=1048576 qps=4 writes=16 mib_per_s=12.34
# An emulated CPU's clock is uneven: now and then perftest cannot calibrate on it and reports 0, so
# that a measurement is tried three times.
qps=${1:-4} writes=${2:-16} bytes=1048576
# 4.3 s for an acknowledgement: an emulated CPU is late now and then, and what is sent again for
# nothing takes bandwidth.
set -- -x 1 -F -s $bytes -q "$qps" -n "$writes" -u 20
out=$(mktemp)
trap 'rm -f "$out" "$out.server"' EXIT

measure() { # prints the average in MiB/s, nothing if there is none
    timeout 120 ib_write_bw -d rxe0 "$@" >"$out.server" 2>&1 &
    server=$!
    # Its port (18515, in hexadecimal) has to listen before the client comes.
    for _ in $(seq 200); do
        grep -q ':4853 ' /proc/net/tcp /proc/net/tcp6 && break
        kill -0 $server 2>/dev/null || break
        sleep 0.1
    done
    timeout 120 ib_write_bw -d rxe1 "$@" 10.99.0.1 >"$out" 2>&1 || kill $server 2>/dev/null
    wait $server
    awk -v bytes=$bytes '$1 == bytes && $4 > 0 { print $4 }' "$out"
}

for _ in 1 2 3; do
    rate=$(measure "$@")
    if [ -n "$rate" ]; then
        echo "ib_write_bw bytes=$bytes qps=$qps writes=$writes mib_per_s=$rate"
        exit 0
    fi
done
cat "$out.server" "$out" >&2
exit 1
