"""A kubelet for tests: pods of an API server as processes of this machine.

    pods without a node -> kubelet.py binds them, and starts, probes, restarts and ends them
                             -> sandbox.py: volumes in a directory, paths in commands rewritten
                             -> names.py: names of pods and Services resolve to loopback addresses

A pod has an address of its own in 127.77/16, which every process of the machine reaches on Linux;
the second of pytest-xdist's workers takes 127.78/16, and so on, since ports of pods are the same.
Images are not looked at: commands run with this Python environment first in PATH. Nothing is
isolated: a pod sees the machine's files, and limits and security contexts do nothing.
"""

from __future__ import annotations

from .kubelet import Kubelet

__all__ = ["Kubelet"]
