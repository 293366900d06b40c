#!/bin/sh
# tests.sh PROGRAM...: in the VM, runs the tests of Rust test programs one after the other, since
# they share two devices and change what their link does to packets. Tests that are ignored
# elsewhere, for want of devices, run too. A process for each: one that crashes or hangs is one that
# failed, and what failed is told at once. A script (*.sh) is run as it is; of PROGRAM@PATH only the
# tests whose paths have PATH in them are run. Fails if any failed.
limit=300
code=0

test_of() { # test_of PROGRAM NAME
    timeout -s KILL $limit "$1" --exact "$2" --include-ignored --show-output && return
    ended=$?
    code=1
    # 101: libtest itself told of it.
    [ $ended = 101 ] || cat <<END
error: $2 ended with $ended; 137: it was killed after $limit s
test $2 ... FAILED

test result: FAILED. 0 passed; 1 failed; 0 ignored
END
}

for program; do
    echo "     Running $program"
    case $program in
    *.sh) sh "$program" || code=1 ;;
    *)
        only=
        case $program in *@*) only=${program#*@} program=${program%@*} ;; esac
        names=$("$program" --list --format terse --include-ignored $only) || code=1
        for name in $(printf '%s\n' "$names" | sed -n 's/: test$//p'); do
            test_of "$program" "$name"
            # What a test that crashed left on the link is no business of the next one's.
            for device in veth0 veth1; do tc qdisc del dev $device root 2>/dev/null; done
        done
        ;;
    esac
done
exit $code
