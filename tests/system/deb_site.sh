# Prints the path of a root file system of a Debian (first word: its codename) with systemd and Slurm and without a trace of ours:
# tests/system/test_deb.py boots hosts over it (scavenger.cluster.sandbox.hosts). Run with $root, the clone, and $cache.
set -euo pipefail
. "$root/scripts/root-file-system"
needs_root_on_debian
packages=systemd,systemd-sysv,dbus,adduser,munge,slurmctld,slurmd,slurm-client,slurm-wlm-basic-plugins,procps,iproute2,python3,man-db,bash-completion,lmod

make_bare() { # CODENAME DIR
    make_system "$1" "$2"
    mkdir -p "$2/etc/slurm" "$2/shared"
    touch "$2"/etc/slurm/{slurm,gres,cgroup}.conf "$2/etc/munge/munge.key" "$2/etc/tmpfiles.d/scvgpus.conf" \
        "$2/etc/systemd/network/10-host0.network" "$2/etc/hosts"
    chroot "$2" systemctl --quiet enable systemd-networkd
    chroot "$2" systemctl --quiet disable slurmctld slurmd
}

if [ "$1" = make ]; then
    make_bare "$2" "$3"
    exit
fi
mkdir -p "$cache"
kept_system "$1" "deb-$(printf %s "$packages" | cksum | cut -d' ' -f1)" bash "$0" make >&2
echo "$base"
