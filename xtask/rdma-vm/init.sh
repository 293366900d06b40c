#!/bin/sh
# First process of the VM: loads modules, makes two connected RDMA devices, runs the command,
# reports its exit status. run.sh puts it and what it reads into the initramfs.
/usr/bin/busybox --install -s /usr/bin
export PATH=/usr/bin:/usr/sbin:/bin:/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t devpts pts /dev/pts
ln -sf /proc/self/fd /dev/fd
ln -sf fd/0 /dev/stdin
ln -sf fd/1 /dev/stdout
ln -sf fd/2 /dev/stderr
# RDMA pins memory; a test that wants no more than some lowers this for itself.
# shellcheck disable=SC3045 # dash has -l
ulimit -l unlimited
hostname rdma-vm
for module in /rdma-vm/modules/*; do
    insmod "$module" || echo "rdma-vm: cannot load $module"
done

# The two ports to the host: the command's output, its exit status.
output="" status=""
for _ in $(seq 100); do
    for port in /sys/class/virtio-ports/*; do
        case $(cat "$port/name" 2>/dev/null) in
        output) output=/dev/${port##*/} ;;
        status) status=/dev/${port##*/} ;;
        esac
    done
    [ -c "$output" ] && [ -c "$status" ] && break
    sleep 0.05
done

ip link set lo up
# Duplicate address detection would leave IPv6 GIDs unusable for a second or two.
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
ip link add veth0 type veth peer name veth1
# rxe takes a packet in only on the net device that it sits on and, in this kernel, only in the
# first network namespace. With both ends in one namespace the kernel would short-cut their traffic
# through lo, where rxe drops it. The rules below send it out on the link instead: an address counts
# as local for what came in on its own device and for itself; for all else there is a route.
for d in 0 1; do
    me=10.99.0.$((d + 1)) peer=10.99.0.$((2 - d))
    echo 1 >/proc/sys/net/ipv4/conf/veth$d/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/veth$d/rp_filter
    ip addr add $me/32 dev veth$d
    ip link set veth$d mtu 4200 up # room for RoCE's largest path MTU, 4096
    ip rule add pref 10 iif veth$d lookup local
    ip rule add pref 20 from $me to $me lookup local
    # A known neighbour: else the first connect waits about a second for ARP.
    ip neigh replace $peer lladdr "$(cat /sys/class/net/veth$((1 - d))/address)" dev veth$d nud permanent
done
ip rule add pref 30 lookup 100
ip rule add pref 40 lookup local
ip rule del pref 0
for d in 0 1; do
    ip route add 10.99.0.$((2 - d)) dev veth$d src 10.99.0.$((d + 1)) table 100
    rdma link add rxe$d type rxe netdev veth$d || echo "rdma-vm: no rxe$d"
done

new=
while read -r tag folder; do
    if [ "$folder" = / ]; then
        # The host's file system as root: read-only, changes kept in memory
        mkdir -p /ro /rw /new
        mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro "$tag" /ro &&
            mount -t tmpfs rw /rw && mkdir /rw/up /rw/work &&
            mount -t overlay -o lowerdir=/ro,upperdir=/rw/up,workdir=/rw/work,index=off,xino=off \
                root /new && new=/new
        for d in proc sys dev; do mount -o rbind /$d /new/$d; done
        mkdir -p /new/rdma-vm
        cp /rdma-vm/command /new/rdma-vm/
    else
        mkdir -p "$new$folder"
        mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none "$tag" "$new$folder"
    fi || echo "rdma-vm: cannot mount $tag on $folder"
done </rdma-vm/shares

echo "rdma-vm: ready after $(cut -d' ' -f1 /proc/uptime) s"
mkfifo /rdma-vm/pipe
cat </rdma-vm/pipe >"$output" &
reader=$!
if [ -n "$new" ]; then
    chroot $new /bin/sh /rdma-vm/command
else
    sh /rdma-vm/command
fi </dev/null >/rdma-vm/pipe 2>&1
code=$?
# Something that the command left running may keep the pipe open: let it drain for 2 s at most.
for _ in $(seq 40); do
    kill -0 $reader 2>/dev/null || break
    sleep 0.05
done
echo "rdma-vm: command ended with $code after $(cut -d' ' -f1 /proc/uptime) s; $(grep MemAvail /proc/meminfo)"
sync
echo $code >"$status"
echo o >/proc/sysrq-trigger
sleep 60
