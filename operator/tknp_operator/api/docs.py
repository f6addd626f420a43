"""docs/tokenparallelservice.md, made from the same schema as the CRD.

    python -m tknp_operator.api.docs > docs/tokenparallelservice.md

One table a mapping of the spec, its rules below it, then the status.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tknp_operator.api.crd import spec_schema
from tknp_operator.api.spec import GROUP, KIND, NAME, PLURAL, VERSION
from tknp_operator.api.status import CONDITIONS, STATUS

CPU_SAMPLE = f"""\
apiVersion: {GROUP}/{VERSION}
kind: {KIND}
metadata:
  name: demo
spec:
  image: ghcr.io/tknp/tknp:latest
  model:
    source:
      builtin: smollm2
    dtype: float32
  decode:
    device: cpu
    nodes: 2
    kvMemory: 512MiB
    resources:
      requests: {{cpu: "1", memory: 2Gi}}
"""

GPU_SAMPLE = f"""\
apiVersion: {GROUP}/{VERSION}
kind: {KIND}
metadata:
  name: llama-405b
spec:
  image: ghcr.io/tknp/tknp:latest
  model:
    name: llama-3.1-405b
    shape: llama-3.1-405b
    source:
      pvc: {{claimName: weights, path: Llama-3.1-405B-Instruct-FP8}}
    maxLength: 131072
  decode:
    nodes: 8
    tensorParallel: 4
    gpuProducts: [GB200]
    copies: 2
    spareNodes: 1
  prefill:
    replicas: 2
    maxReplicas: 8
    tensorParallel: 4
    autoscaling: {{minReplicas: 2, maxReplicas: 8}}
  gateway:
    autoscaling: {{minReplicas: 2, maxReplicas: 10}}
    tlsSecret: llama-405b-tls
  topology:
    rdmaResource: rdma/ib
    computeDomain: true
"""

_INTRO = f"""\
# {KIND}

<!-- Made by `python -m tknp_operator.api.docs`; edit operator/tknp_operator/api instead. -->

A model served by a token-parallel pool of decode nodes: `{GROUP}/{VERSION}`, short name `tps`.

On any cluster, without a GPU:

```yaml
{CPU_SAMPLE}```

On GB200, with two copies of the weights, prefill that follows its queue, and a spare node:

```yaml
{GPU_SAMPLE}```

`kubectl get tps` shows whether it is ready and why not; `kubectl describe tps NAME` shows where
each node of the pool is and why. `kubectl scale tps NAME --replicas 3` sets `prefill.replicas`; the
gateway's Deployment scales by itself or by hand.

Nothing is immutable. Changes of `image`, `model`, `decode`, `prefill.maxReplicas`,
`prefill.tensorParallel` and of most time-outs take the pool through a drain to a new epoch; numbers
of replicas do not.

{NAME.message}.
"""


def text() -> str:
    """The whole page."""
    return "\n".join([_INTRO, *_mapping("spec", spec_schema()), *_status()])


def _mapping(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Tables of the mapping at `path` and of those inside it."""
    yield f"## {path}\n"
    if "description" in schema:
        yield f"{schema['description']}\n"
    yield "| field | type | default | |\n|---|---|---|---|"
    inner = []
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        default = "required" if name in required else _default(field)
        description = field.get("description", "").replace("|", "\\|")
        yield f"| `{name}` | {_type(field)} | {default} | {description} |"
        if "properties" in field:
            inner.append((f"{path}.{name}", field))
    yield ""
    rules = schema.get("x-kubernetes-validations", ())
    if rules:
        yield "\n".join(f"- {rule['message']}" for rule in rules) + "\n"
    for there, field in inner:
        yield from _mapping(there, field)


def _default(field: Mapping[str, Any]) -> str:
    if "default" not in field or field.get("properties"):
        return ""
    return f"`{json.dumps(field['default'])}`"


def _type(field: Mapping[str, Any]) -> str:
    """Its type and the values that it may have."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    kind = str(field["type"])
    if kind == "array":
        return f"list of {_type(field['items'])}"
    if "additionalProperties" in field:
        return f"mapping to {_type(field['additionalProperties'])}"
    if kind == "object":
        return "mapping"
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None:
        return f"{kind}, {low} to {high}" if high is not None else f"{kind}, at least {low}"
    return kind


def _status() -> Iterator[str]:
    yield "## status\n"
    yield "| field | |\n|---|---|"
    for name, field in STATUS["properties"].items():
        yield f"| `{name}` | {field['description']} |"
    yield "\n| condition | True when |\n|---|---|"
    for condition, meaning in CONDITIONS.items():
        yield f"| `{condition}` | {meaning} |"
    yield f"\n`kubectl explain {PLURAL}.spec` says the same."


def main() -> None:
    print(text())


if __name__ == "__main__":
    main()
