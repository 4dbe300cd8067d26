"""What a node needs of its machine: mounts, control groups and a bridge, all private to this process's namespaces."""

import pathlib

from daemons import run

ADDRESS = "10.77.0.1"  # of the bridge, that is of the node in the pods' network
CGROUP = "rapt-cluster"
CGROUPS = pathlib.Path("/sys/fs/cgroup")

# What kubelet sets for the whole machine; it sets copies.
SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
# Where programs write whatever they are told.
WRITTEN = ("/run", "/var/log", "/var/lib/cni")

NETWORK = """{
  "cniVersion": "0.4.0",
  "name": "rapt",
  "plugins": [{
    "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
    "ipam": {
      "type": "host-local",
      "ranges": [[{"subnet": "10.77.0.0/24", "rangeStart": "10.77.0.10"}]],
      "routes": [{"dst": "0.0.0.0/0"}]
    }
  }]
}
"""


def cpu_cgroups():
    """The folder of the hierarchy that limits CPU time."""
    return CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "cpu"


def hide_written_folders():
    for folder in WRITTEN:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "tmpfs", folder)


def copy_settings(folder):
    folder.mkdir()
    for setting in SETTINGS:
        original, copy = pathlib.Path("/proc/sys") / setting, folder / setting.replace("/", ".")
        copy.write_text(original.read_text())
        run("mount", "--bind", copy, original)


def create_cgroups():
    """One group in each hierarchy of version 1, or in that of version 2."""
    if (CGROUPS / "cgroup.controllers").exists():
        (CGROUPS / CGROUP).mkdir(exist_ok=True)
        return
    for hierarchy in CGROUPS.iterdir():
        if hierarchy.is_dir() and not hierarchy.is_symlink():
            (hierarchy / CGROUP).mkdir(exist_ok=True)
    for file in ("cpuset.cpus", "cpuset.mems"):
        (CGROUPS / "cpuset" / CGROUP / file).write_text((CGROUPS / "cpuset" / file).read_text())


def create_network(folder):
    folder.mkdir()
    (folder / "10-bridge.conflist").write_text(NETWORK)
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "cni0", "type", "bridge")
    run("ip", "addr", "add", f"{ADDRESS}/24", "dev", "cni0")
    run("ip", "link", "set", "cni0", "up")
    run("ip", "route", "add", "default", "via", ADDRESS)
    pathlib.Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def prepare(folder):
    hide_written_folders()
    copy_settings(folder / "settings")
    create_cgroups()
    create_network(folder / "network")
