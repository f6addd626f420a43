"""What the operator may do, as data. The executor carries steps out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Apply:
    """Server-side apply: make the fields of `manifest` so, whoever else set them."""

    manifest: Manifest


@dataclass(frozen=True)
class Create:
    """Make what never changes afterwards. That it exists already is no error: caches are late."""

    manifest: Manifest


@dataclass(frozen=True)
class Annotate:
    """Set one annotation of what is there, and nothing else of it."""

    kind: str
    name: str
    key: str
    value: str


@dataclass(frozen=True)
class Merge:
    """Set the fields of `patch` in what is there, and nothing else of it."""

    kind: str
    name: str
    patch: Manifest


@dataclass(frozen=True)
class Delete:
    """Delete that very object: one of the same name and another uid stays."""

    kind: str
    name: str
    uid: str
    grace_s: int | None = None


@dataclass(frozen=True)
class SetFinalizers:
    """Of the service itself."""

    finalizers: tuple[str, ...]


@dataclass(frozen=True)
class SetStatus:
    status: Manifest


@dataclass(frozen=True)
class Event:
    """For whoever runs `kubectl describe`."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


Step = Apply | Create | Annotate | Merge | Delete | SetFinalizers | SetStatus | Event


@dataclass(frozen=True)
class Plan:
    """`steps` in order; `again_s`: look again after so long though nothing has changed."""

    steps: tuple[Step, ...]
    again_s: float | None = None


def describe(step: Step) -> str:
    """One line, for logs and for tests of sequences."""
    match step:
        case Apply(manifest) | Create(manifest):
            verb = type(step).__name__.lower()
            return f"{verb} {manifest['kind']}/{manifest['metadata']['name']}"
        case Annotate(kind, name, key, _):
            return f"annotate {kind}/{name} {key.rpartition('/')[2]}"
        case Merge(kind, name, _):
            return f"merge {kind}/{name}"
        case Delete(kind, name, _, grace_s):
            return f"delete {kind}/{name}" + ("" if grace_s is None else f" in {grace_s} s")
        case SetFinalizers(finalizers):
            return f"finalizers {', '.join(finalizers) or 'none'}"
        case SetStatus():
            return "status"
        case Event(_, reason, _):
            return f"event {reason}"
