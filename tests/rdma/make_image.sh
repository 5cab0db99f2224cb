#!/bin/bash
# Build the virtual machine of `make test-rdma` in the folder $1: vmlinuz, initrd and root.img (800 MB, a few minutes).
# PYTHON names the Python whose pip downloads the wheels. Needs root, and Debian's package lists.
#
# The image holds no code of this repository: `boot.sh` shares the checkout with the guest, which starts with guest_init.
set -euo pipefail
top=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
work=$(mktemp -d "$1/making.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
work=$(pwd -P)

# The kernel's package is unpacked, not installed, so nothing generates an initramfs. Only the modules below are kept.
mkdir kernel
chmod 755 . kernel
chown _apt kernel 2>/dev/null || true
package=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -1)
test -n "$package" || { echo "apt knows no kernel: run 'apt-get update'" >&2; exit 1; }
(cd kernel && apt-get download -q "$package" && dpkg-deb -x ./*.deb . && rm ./*.deb)
version=$(ls kernel/lib/modules)
depmod -b kernel "$version"
files_of() {
    modprobe -d "$work/kernel" -S "$version" --show-depends -a "$@" | awk '/^insmod/ && !seen[$2]++ { print $2 }'
}
to_boot=(virtio_pci virtio_blk crc32c_generic ext4 9pnet_virtio 9p)
# rdma_rxe asks for crc32 when a device is made, so its own dependencies do not list it.
later=(virtio_rng rdma_rxe ib_uverbs rdma_ucm veth sch_netem crc32_generic crc32_pclmul)

mmdebstrap --quiet --variant=minbase --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --include=ibverbs-providers,ibverbs-utils,iproute2,kmod,libgomp1,procps,python3 bookworm root
for file in $(files_of "${to_boot[@]}" "${later[@]}"); do
    install -D -m 644 "$file" "root/usr/${file#"$work/kernel/"}"
done
cp kernel/lib/modules/"$version"/modules.{order,builtin,builtin.modinfo} "root/usr/lib/modules/$version/"
depmod -b root "$version"

# What the transports and their tests import, for the guest's Python. They need no PyTorch.
"${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary :all: \
    --python-version 3.11 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -c "$top/requirements/constraints.txt" -c "$top/requirements/constraints-cuda12.txt" --target root/site \
    numpy msgpack pyzmq xxhash nixl-cu12 ucxx-cu12 libucxx-cu12 \
    pytest pytest-timeout pytest-asyncio pluggy iniconfig packaging pygments typing_extensions
rm -rf root/site/nixl_ep_cu12 root/site/include root/site/*/include root/site/numpy/*/tests
find root/site -name '*.a' -delete
chroot root python3 -m compileall -q /site /usr/lib/python3 > /dev/null || true

# NIXL's libibverbs has drivers for Mellanox's devices alone. Debian's has one for soft-RoCE.
verbs=$(basename root/site/nixl_cu12.libs/libibverbs-*)
ln -sf /usr/lib/x86_64-linux-gnu/libibverbs.so.1 "root/site/nixl_cu12.libs/$verbs"

# The UCX in `ucxx`'s wheels has no RDMA, and NIXL's has. With this name `ucxx` finds it, where LD_LIBRARY_PATH leads to it.
ln -s "$(basename root/site/nixl_cu12.libs/libucp-*)" root/site/nixl_cu12.libs/libucp.so.0

mkdir -p root/share
mke2fs -q -t ext4 -O ^has_journal -d root root.img 1500M

# The initrd loads what the root file system and the shared folder need, and hands over to the guest's init.
mkdir -p initrd.d/bin
cp "$(command -v busybox)" initrd.d/bin/busybox
{
    echo '#!/bin/busybox sh'
    echo 'PATH=/bin; busybox mkdir -p /dev /root; busybox mount -t devtmpfs dev /dev'
    for file in $(files_of "${to_boot[@]}"); do
        cp "$file" initrd.d/
        echo "busybox insmod /$(basename "$file")"
    done
    echo 'for i in 1 2 3 4 5 6 7 8 9; do [ -b /dev/vda ] && break; busybox sleep 0.2; done'
    echo 'busybox mount -t ext4 /dev/vda /root'
    echo 'busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none share /root/share'
    echo 'exec busybox switch_root /root /bin/sh /share/guest_init'
} > initrd.d/init
chmod +x initrd.d/init
(cd initrd.d && find . | cpio --quiet -o -H newc | gzip -1) > initrd
cp "kernel/boot/vmlinuz-$version" vmlinuz
mv vmlinuz initrd root.img "$1/"
