"""What tests of Kubernetes stand on: a cluster, accounts of it, machines of it, a scene in it."""

from __future__ import annotations

from .accounts import grant, install, kubeconfig_of
from .cluster import Cluster, empty, namespace, prepared, real
from .machines import Machines, tell_node
from .scene import Scene
from .things import definition, things

__all__ = [
    "Cluster",
    "Machines",
    "Scene",
    "definition",
    "empty",
    "grant",
    "install",
    "kubeconfig_of",
    "namespace",
    "prepared",
    "real",
    "tell_node",
    "things",
]
