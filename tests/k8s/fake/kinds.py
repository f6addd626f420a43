"""Which resources there are, and what the server fills in or keeps constant for built-in ones."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from .errors import invalid

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True)
class Kind:
    """One resource. `schema`: of a custom one. `scale`: paths of its parts."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False
    short: tuple[str, ...] = ()
    schema: dict[str, Any] | None = field(default=None, compare=False, hash=False)
    scale: tuple[str, str, str] | None = None
    columns: tuple[Any, ...] = field(default=(), compare=False, hash=False)  # of kubectl get

    @property
    def key(self) -> tuple[str, str]:
        return self.group, self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


_DEPLOYMENT_SCALE = (".spec.replicas", ".status.replicas", "")
BUILTIN = (
    Kind("", "v1", "namespaces", "Namespace", False, True, ("ns",)),
    Kind("", "v1", "nodes", "Node", False, True, ("no",)),
    Kind("", "v1", "pods", "Pod", True, True, ("po",)),
    Kind("", "v1", "services", "Service", True, True, ("svc",)),
    Kind("", "v1", "configmaps", "ConfigMap", True, False, ("cm",)),
    Kind("", "v1", "secrets", "Secret"),
    Kind("", "v1", "events", "Event", True, False, ("ev",)),
    Kind("", "v1", "serviceaccounts", "ServiceAccount", True, False, ("sa",)),
    Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", True, True, ("pvc",)),
    Kind("apps", "v1", "deployments", "Deployment", True, True, ("deploy",),
         scale=_DEPLOYMENT_SCALE),
    Kind("batch", "v1", "jobs", "Job", True, True),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", True, True, ("pdb",)),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", True, False, ("netpol",)),
    Kind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", True, True,
         ("hpa",)),
    Kind("coordination.k8s.io", "v1", "leases", "Lease"),
    Kind("events.k8s.io", "v1", "events", "Event"),
    Kind("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    Kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    Kind("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", False),
    Kind("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", False),
    Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition",
         False, True, ("crd",)),
)  # fmt: skip
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def custom(crd: dict[str, Any]) -> list[Kind]:
    """The resources that a CustomResourceDefinition adds, one a served version."""
    spec, found = crd["spec"], []
    for version in spec["versions"]:
        if not version["served"]:
            continue
        parts = version.get("subresources") or {}
        scale = parts.get("scale")
        paths = scale and (
            scale["specReplicasPath"], scale["statusReplicasPath"],
            scale.get("labelSelectorPath", ""),
        )  # fmt: skip
        names = spec["names"]
        found.append(
            Kind(spec["group"], version["name"], names["plural"], names["kind"],
                 spec["scope"] == "Namespaced", "status" in parts,
                 tuple(names.get("shortNames") or ()),
                 version["schema"]["openAPIV3Schema"], paths or None,
                 tuple(version.get("additionalPrinterColumns") or ()))
        )  # fmt: skip
    return found


def check_metadata(obj: dict[str, Any], kind: Kind) -> None:
    """Raise Refused 422 for a name, label or owner that no server takes."""
    metadata = obj["metadata"]
    name, problems = metadata["name"], []
    names = kind.group == "rbac.authorization.k8s.io" or (len(name) < 254 and _NAME.fullmatch(name))
    if kind.plural in ("services", "namespaces") and (len(name) > 63 or "." in name):
        names = False
    if not names:
        problems.append(("metadata.name", f"Invalid value: {name!r}: a lowercase RFC 1123 name"))
    for key, value in (metadata.get("labels") or {}).items():
        if not (isinstance(value, str) and _LABEL.fullmatch(value) and _KEY.fullmatch(key)):
            problems.append(("metadata.labels", f"Invalid value: {key}={value!r}"))
    for key, value in (metadata.get("annotations") or {}).items():
        if not (isinstance(value, str) and _KEY.fullmatch(key)):
            problems.append(("metadata.annotations", f"Invalid value: {key}={value!r}"))
    for i, owner in enumerate(metadata.get("ownerReferences") or ()):
        missing = [part for part in ("apiVersion", "kind", "name", "uid") if not owner.get(part)]
        path = f"metadata.ownerReferences[{i}]"
        problems += [(f"{path}.{part}", "must not be empty") for part in missing]
    if problems:
        raise invalid(kind.kind, name, problems)


def fill_in(obj: dict[str, Any], kind: Kind) -> None:
    """Defaults of built-in kinds as far as clients here can see them."""
    spec = obj.get("spec")
    if kind.kind == "Pod" and spec is not None:
        _pod_spec(spec)
        spec.setdefault("schedulerName", "default-scheduler")
        obj.setdefault("status", {}).setdefault("phase", "Pending")
        obj["status"].setdefault("qosClass", "BestEffort")
    elif kind.kind == "Service" and spec is not None:
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("sessionAffinity", "None")
        for port in spec.get("ports") or ():
            port.setdefault("protocol", "TCP")
            port.setdefault("targetPort", port["port"])
    elif kind.kind in ("Deployment", "Job") and spec is not None:
        if kind.kind == "Deployment":
            spec.setdefault("replicas", 1)
            spec.setdefault("progressDeadlineSeconds", 600)
        _pod_spec(spec["template"]["spec"])
    elif kind.kind == "Node":
        if "resourceVersion" not in obj["metadata"]:  # until its machine has said something
            taint = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
            obj.setdefault("spec", {}).setdefault("taints", [taint])
    elif kind.kind == "Secret":
        obj.setdefault("type", "Opaque")
    elif kind.kind == "Namespace":
        obj.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
        obj.setdefault("status", {}).setdefault("phase", "Active")


def _pod_spec(spec: dict[str, Any]) -> None:
    for key, value in (("restartPolicy", "Always"), ("terminationGracePeriodSeconds", 30),
                       ("dnsPolicy", "ClusterFirst"), ("securityContext", {})):  # fmt: skip
        spec.setdefault(key, value)
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container.setdefault("imagePullPolicy", "IfNotPresent")
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        for port in container.get("ports") or ():
            port.setdefault("protocol", "TCP")


def check_change(old: dict[str, Any], new: dict[str, Any], kind: Kind) -> None:
    """Raise Refused 422 where a built-in kind does not let itself be changed."""
    name = new["metadata"]["name"]
    if kind.kind in ("ConfigMap", "Secret") and old.get("immutable"):
        for part in ("data", "binaryData", "immutable"):
            if old.get(part) != new.get(part):
                text = "field is immutable when `immutable` is set"
                raise invalid(kind.kind, name, [(part, text)])
    if kind.kind == "Pod" and _fixed(old["spec"]) != _fixed(new["spec"]):
        text = "Forbidden: pod updates may not change fields other than images and tolerations"
        raise invalid(kind.kind, name, [("spec", text)])
    immutable = {"Job": ("template", "selector"), "Deployment": ("selector",)}
    for part in immutable.get(kind.kind, ()):
        if old["spec"].get(part) != new["spec"].get(part):
            raise invalid(kind.kind, name, [(f"spec.{part}", "field is immutable")])


def _fixed(spec: dict[str, Any]) -> dict[str, Any]:
    rest = {k: v for k, v in spec.items() if k not in ("tolerations", "activeDeadlineSeconds")}
    for part in ("containers", "initContainers"):
        if part in rest:
            rest[part] = [{k: v for k, v in c.items() if k != "image"} for c in rest[part]]
    return rest
