"""Where a pool's weights lie, and what the model is called."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tknp_operator.api.rules import Part, Rule

AbsolutePath = Annotated[str, Field(pattern=r"^/", max_length=1024)]
RelativePath = Annotated[str, Field(pattern=r"^$|^[^/]", max_length=1024)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]


class Claim(Part):
    claim_name: Name
    """A PersistentVolumeClaim of the namespace that all nodes can read."""
    path: RelativePath = ""
    """Of the checkpoint, inside the volume."""


class HostPath(Part):
    path: AbsolutePath
    """The same directory or GGUF file on every node."""


class ImageVolume(Part):
    reference: Annotated[str, Field(min_length=1, max_length=1024)]
    """An OCI artifact; needs a cluster with image volumes."""
    path: RelativePath = ""
    """Of the checkpoint, inside the image."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When nodes fetch it."""


class ObjectStore(Part):
    uri: Annotated[str, Field(pattern=r"^(s3|gs|https?)://.+", max_length=1024)]
    """A prefix of objects; one Job copies it, once, and pods wait for its completion marker."""
    claim_name: Name
    """The ReadWriteMany claim that the objects are copied to."""
    secret_name: Name | None = None
    """Credentials, as environment variables of the Job."""


class Source(Part):
    pvc: Claim | None = None
    """A volume that holds the checkpoint."""
    host_path: HostPath | None = None
    """A place on every node's own disk."""
    image: ImageVolume | None = None
    """An image mounted as a volume."""
    object_store: ObjectStore | None = None
    """Objects that are copied to a volume first."""
    builtin: Literal["smollm2"] | None = None
    """A small model that the image brings: to try a cluster without a GPU."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.pvc), has(self.hostPath), has(self.image), has(self.objectStore), "
            "has(self.builtin)].filter(x, x).size() == 1",
            lambda s: sum(x is not None for x in (s.pvc, s.host_path, s.image, s.object_store,
                                                  s.builtin)) == 1,
            "give exactly one of pvc, hostPath, image, objectStore, builtin",
        ),
    )  # fmt: skip


class Model(Part):
    source: Source
    """Where the checkpoint is: exactly one of its fields."""
    name: Annotated[str, Field(max_length=253)] = ""
    """What clients call it; empty: the name of its directory or file."""
    shape: Annotated[str, Field(max_length=63)] = ""
    """Its name in `tknp explain`'s table; with it, blocks and roots are shown before a start."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of weights and KV cache."""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """Prompt plus output of a request in tokens; unset: what the checkpoint declares."""
