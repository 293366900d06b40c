#!/bin/sh
# tests.sh PROGRAM...: in the VM, runs test programs one after the other, and the tests of each too:
# they share two devices and change what their link does to packets. Tests that are ignored elsewhere,
# for want of devices, run too. Fails if any failed.
code=0
for program; do
    echo "     Running $program"
    "$program" --test-threads=1 --include-ignored || {
        code=$?
        echo "error: $program ended with $code"
    }
    # What a test that crashed left on the link is no business of the next program's.
    for device in veth0 veth1; do tc qdisc del dev $device root 2>/dev/null; done
done
exit $code
