"""Names of network interfaces: those of containers, and how variables name one."""

from __future__ import annotations

import re

# Beginnings of names.
_VIRTUAL = ("docker", "veth", "virbr", "cali", "flannel", "cni", "podman", "lxc", "nerdctl")
_BRIDGE_OF_DOCKER = re.compile(r"br-[0-9a-f]{12}")
# Variables that name a node's interface: gloo and torch's tensor pipes take a name, the others the
# beginning of one, or after "=" all of it. tasks/preflight/environment.yaml says what each does.
INTERFACE_VARIABLES = {
    "cpu": {"GLOO_SOCKET_IFNAME": "{}", "TP_SOCKET_IFNAME": "{}"},
    "cuda": {"GLOO_SOCKET_IFNAME": "{}", "TP_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"},
    "npu": {"GLOO_SOCKET_IFNAME": "{}", "TP_SOCKET_IFNAME": "{}", "HCCL_SOCKET_IFNAME": "={}"},
}


def is_virtual(name: str) -> bool:
    """Whether an interface is one of containers or virtual machines; a site's own br-lan is not."""
    return name.startswith(_VIRTUAL) or _BRIDGE_OF_DOCKER.fullmatch(name) is not None
