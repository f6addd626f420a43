"""The pool file of one epoch, and the hash that says which pods may work together.

    spec + epoch -> pool.yaml (an immutable ConfigMap) -> every process of the epoch

The hash covers what two processes must agree on: image and pool file without its epoch. Prefill
replicas come and go within their places, so their number is not in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import yaml

from tknp.config import pool_from
from tknp_operator.api.service import Service
from tknp_operator.api.spec import Spec
from tknp_operator.build.names import (
    CERTIFICATE,
    COORDINATOR_PORT,
    DATA_PLANE_PORT,
    DECODE_PORT,
    METRICS_PORT,
    MODEL_DIRECTORY,
    PREFILL_DATA_PLANE_PORT,
    PREFILL_PORT,
    SECRET_DIRECTORY,
    domain,
    member,
    metadata,
)
from tknp_operator.placement.place import Placement

_DIGITS = 16


def model_path(spec: Spec) -> str:
    """Where a pod finds the checkpoint."""
    source = spec.model.source
    if source.builtin is not None:
        return source.builtin
    if source.host_path is not None:
        return MODEL_DIRECTORY + "/" + source.host_path.path.rstrip("/").rpartition("/")[2]
    volume = source.pvc or source.image
    inside = volume.path if volume is not None else ""
    return f"{MODEL_DIRECTORY}/{inside}".rstrip("/")


def pool_settings(
    service: Service, epoch: int, memories: Sequence[int] | None = None
) -> dict[str, Any]:
    """The pool file as plain data. Raises InvalidValue where a pool would refuse it.

    `memories`: bytes of weights plus KV on each rank of each node, where they differ, so that
    every process cuts the blocks for equal KV budgets; None: all are alike, and measured.
    """
    spec, behind = service.spec, domain(service)
    decode, prefill, metrics = spec.decode, spec.prefill, spec.observability.metrics

    def group(role: str, index: int, ranks: int, port: int) -> dict[str, Any]:
        host = f"{member(role, epoch, index)}.{behind}"
        made: dict[str, Any] = {"addresses": [f"{host}:{port + t}" for t in range(ranks)]}
        if metrics:
            made["metrics_addresses"] = [f"{host}:{METRICS_PORT + t}" for t in range(ranks)]
        return made

    nodes = [
        {**group("decode", n, decode.tensor_parallel, DECODE_PORT), "role": decode.role(n)}
        for n in range(decode.nodes)
    ]
    for node, memory in zip(nodes, memories or (), strict=False):
        node["memory_bytes"] = memory
    replicas = []
    for p in range(prefill.places):
        replica = group("prefill", p, prefill.tensor_parallel, PREFILL_PORT)
        if prefill.tensor_parallel > 1:
            host = f"{member('prefill', epoch, p)}.{behind}"
            replica["data_plane"] = f"{host}:{PREFILL_DATA_PLANE_PORT}"
        replicas.append(replica)
    coordinator = f"{member('coordinator', epoch)}.{behind}"
    settings: dict[str, Any] = {
        "model": model_path(spec), "served_model_name": spec.model.name, "epoch": epoch,
        "coordinator": f"{coordinator}:{COORDINATOR_PORT}",
        "data_plane": f"{member('decode', epoch, 0)}.{behind}:{DATA_PLANE_PORT}",
        "nodes": nodes, "prefill": replicas,
        "dtype": spec.model.dtype, "device": decode.device, "transport": "distributed",
        "strategy": decode.strategy, "copies": decode.copies, "microbatches": decode.microbatches,
        "width": decode.width, "max_model_len": spec.model.max_length,
        "page_size": decode.page_size, "kv_memory_bytes": decode.kv_memory,
        "max_batch": decode.max_batch, "timeout_s": spec.timeouts.step_seconds,
        "lease_s": spec.timeouts.lease_seconds, "drain_s": spec.drain.seconds,
        "tls_cert": f"{SECRET_DIRECTORY}/tls.crt", "tls_key": f"{SECRET_DIRECTORY}/tls.key",
        "tls_ca": f"{SECRET_DIRECTORY}/ca.crt", "token_file": f"{SECRET_DIRECTORY}/token",
        "api_token_file": f"{SECRET_DIRECTORY}/api-token",
        "metrics_address": f"{coordinator}:{METRICS_PORT}" if metrics else "",
    }  # fmt: skip
    settings = {key: value for key, value in settings.items() if value is not None}
    pool_from(settings)
    return settings


def compatibility(service: Service) -> str:
    """Hex digits that differ where two pods may not work together."""
    what = [service.spec.image, service.spec.model.model_dump(mode="json"),
            pool_settings(service, 1)]  # fmt: skip
    if service.spec.security.internal_tls_secret is not None:
        what.append(service.spec.security.internal_tls_secret)
    text = json.dumps(what, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def pool_file_map(
    service: Service, epoch: int, placement: Placement, certificate: str = ""
) -> dict[str, Any]:
    """ConfigMap of one epoch; its data never change. Remembers where its nodes are.

    `certificate`: digits of what its pods show each other, by `shown_by`.
    """
    settings = pool_settings(service, epoch, placement.memories)
    name = f"{service.name}-pool-{epoch}"
    slots = [[slot.host, slot.number] for slot in placement.slots]
    meta = metadata(service, name, "pool", epoch=str(epoch), compatibility=compatibility(service))
    meta["annotations"] = {CERTIFICATE: certificate} if certificate else {}
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "immutable": True, "metadata": meta,
        "data": {"pool.yaml": yaml.safe_dump(settings, sort_keys=False),
                 "slots.json": json.dumps(slots)},
    }  # fmt: skip


def membership_map(service: Service, status: dict[str, Any]) -> dict[str, Any]:
    """ConfigMap that people and tools watch: the present epoch and its layout."""
    shown = {key: status[key] for key in ("epoch", "compatibilityHash", "spares")}
    shown["nodes"] = [{k: v for k, v in node.items() if k != "ready"} for node in status["nodes"]]
    return {
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": metadata(service, f"{service.name}-pool", "pool"),
        "data": {"layout.json": json.dumps(shown, sort_keys=True)},
    }  # fmt: skip
