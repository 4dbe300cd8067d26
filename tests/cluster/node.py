"""A cluster of one node: etcd, the control plane, containerd, kubelet and CoreDNS.

RAPT_CLUSTER_TOOLS is the folder of these programs, but for containerd. They run in the namespaces of this process,
which `./dev cluster-test` creates; they end with it.
"""

import json
import os
import pathlib

import api
import image
import machine
from daemons import Daemons, run, wait_until

TOOLS = pathlib.Path(os.environ["RAPT_CLUSTER_TOOLS"])
SOCKET = "/run/containerd/containerd.sock"
PAUSE = "rapt.test/pause:1"
NODE = "node"

CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "/run/containerd/state"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/network"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""

COREDNS = """
.:53 {{
  errors
  kubernetes cluster.local {{
    endpoint {server}
    kubeconfig {kubeconfig} test
    ttl 5
  }}
}}
"""


def kubelet_config(folder):
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{machine.CGROUP}",
        "clusterDNS": [machine.ADDRESS],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "failSwapOn": False,
        "resolvConf": "",
        # Other programs of the machine may need its memory and disk.
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "5s",
        "podLogsDir": f"{folder}/logs",
        "volumePluginDir": f"{folder}/volume-plugins",
    }


class Node:
    def __init__(self, folder):
        self._folder = folder
        self._daemons = Daemons(folder / "daemons")
        os.environ["PATH"] = f"{TOOLS}:{os.environ['PATH']}"
        os.environ["HOME"] = str(folder)
        machine.prepare(folder)
        self._kubeconfig = folder / "kubeconfig"
        api.write_kubeconfig(self._kubeconfig)

    def start(self, images):
        """`images` are archives."""
        self._start_etcd()
        self._start_containerd()
        self._start_api_server()
        self._start_controllers()
        self._start_dns()
        for archive in [self._pause_image(), *images]:
            self.ctr("images", "import", archive)
        self._start_kubelet()
        wait_until(self._is_ready, "the node is not ready")

    def check(self):
        self._daemons.check()

    def close(self):
        self._daemons.close()

    def ctr(self, *arguments):
        return run("ctr", "--address", SOCKET, "--namespace", "k8s.io", *arguments)

    def _start_etcd(self):
        self._daemons.start(
            "etcd",
            "etcd",
            f"--data-dir={self._folder}/etcd",
            "--unsafe-no-fsync",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
        )

    def _start_containerd(self):
        config = self._folder / "containerd.toml"
        config.write_text(CONTAINERD.format(folder=self._folder, socket=SOCKET, pause=PAUSE))
        self._daemons.start("containerd", "containerd", "--config", config)
        wait_until(pathlib.Path(SOCKET).exists, "containerd is not ready")

    def _start_api_server(self):
        key, tokens = self._folder / "accounts.key", self._folder / "tokens.csv"
        run("openssl", "genrsa", "-out", key, "2048")
        tokens.write_text(f'{api.TOKEN},admin,1,"system:masters"\n')
        self._account_key = key
        self._daemons.start(
            "kube-apiserver",
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            "--bind-address=127.0.0.1",
            "--secure-port=6443",
            f"--cert-dir={self._folder}/certificates",
            f"--advertise-address={machine.ADDRESS}",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.78.0.0/24",
            "--service-account-issuer=https://rapt.test",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=AlwaysAllow",
            "--enable-aggregator-routing=true",  # there is no kube-proxy
            "--kubelet-preferred-address-types=InternalIP",
        )
        wait_until(lambda: self.check() or api.is_ready(), "the API server is not ready")

    def _start_controllers(self):
        self._daemons.start(
            "kube-controller-manager",
            "kube-controller-manager",
            f"--kubeconfig={self._kubeconfig}",
            f"--service-account-private-key-file={self._account_key}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            # The autoscaler's figures are for clusters of hours.
            "--horizontal-pod-autoscaler-sync-period=5s",
            "--horizontal-pod-autoscaler-cpu-initialization-period=10s",
            "--horizontal-pod-autoscaler-initial-readiness-delay=5s",
        )
        self._daemons.start(
            "kube-scheduler",
            "kube-scheduler",
            f"--kubeconfig={self._kubeconfig}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
        )

    def _start_dns(self):
        config = self._folder / "Corefile"
        config.write_text(COREDNS.format(server=api.SERVER, kubeconfig=self._kubeconfig))
        self._daemons.start("coredns", "coredns", "-conf", config)

    def _start_kubelet(self):
        config = self._folder / "kubelet.json"
        config.write_text(json.dumps(kubelet_config(self._folder)))
        self._daemons.start(
            "kubelet",
            "kubelet",
            f"--kubeconfig={self._kubeconfig}",
            f"--config={config}",
            f"--hostname-override={NODE}",
            f"--node-ip={machine.ADDRESS}",
            f"--root-dir={self._folder}/kubelet",
            f"--cert-dir={self._folder}/kubelet-certificates",
        )

    def _pause_image(self):
        archive = self._folder / "pause.tar"
        image.write_image(archive, PAUSE, ["/usr/bin/sleep", "infinity"], ["sleep"])
        return archive

    def _is_ready(self):
        self.check()
        conditions = [c for node in api.get("/api/v1/nodes")["items"] for c in node["status"].get("conditions", [])]
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
