"""The operator's process, an API server, a kubelet and the real services of a tiny model.

    tknp-operator --kubeconfig F  <->  fake API server  <->  kubelet  ->  tknp serve ... , gateway

Nothing of the operator, the pods or the clients is replaced; machines are names, and pods are
processes of this one.
"""

from __future__ import annotations

import concurrent.futures
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)
WAIT_S = 150.0


def with_gateway(spec: dict[str, Any]) -> None:
    spec["gateway"] = {"enabled": True, "replicas": 1, "ray": "standalone"}


def stream(here: Any, prompt: str, tokens: int) -> Iterator[str]:
    """Pieces of text of one completion as the gateway sends them; raises unless it ends well."""
    pods = here.cluster.core.list_namespaced_pod(
        here.namespace, label_selector="tknp.io/role=gateway"
    ).items
    address = next(p.status.pod_ip for p in pods if p.metadata.deletion_timestamp is None)
    key = here.secret(f"{here.name}-api-keys", "key").decode()
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "stream": True,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    request = urllib.request.Request(
        f"http://{address}:8000/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )  # fmt: skip
    done = False
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                done = True
            elif data and not data.startswith(":"):
                event = json.loads(data)
                assert "error" not in event, event
                yield event["choices"][0]["text"] if event.get("choices") else ""
    assert done


def serving(here: Any, until: Any) -> None:
    """Wait for the pool, which the service's Ready is about, and for the gateway."""
    until(lambda: here.condition("Ready").get("status") == "True", here.logs, WAIT_S)
    until(lambda: any("gateway" in name for name in here.pods()), here.logs, WAIT_S)
    until(here.all_ready, here.logs, WAIT_S)


def test_a_service_is_applied_serves_and_goes(scene: Any, operator: Any, until: Any) -> None:
    here = scene("a", nodes=1)
    until(lambda: here.condition("Ready").get("status") == "True", here.logs, WAIT_S)
    assert here.service["status"]["epoch"] == 1
    assert here.generate("hello")
    assert operator.poll() is None
    here.cluster.services.delete(name="demo", namespace=here.namespace)
    until(lambda: not here.pods(), lambda: str(here.pods()), WAIT_S)
    assert not here.cluster.services.get(namespace=here.namespace).items


@pytest.mark.full
def test_a_lost_machine_is_replaced_and_streams_go_on(
    scene: Any, operator: Any, until: Any, clusters: Any
) -> None:
    here = scene("a", "b", "c", change=with_gateway)
    serving(here, until)
    expected = "".join(stream(here, "once upon", 150))
    nodes = here.service["status"]["nodes"]
    lost = next(node["host"] for node in nodes if node["index"] == 1)

    pieces = stream(here, "once upon", 150)
    text = next(pieces)
    here.kubelet.lose(lost)
    clusters.tell_node(here.cluster, lost, ready=False)
    text += "".join(pieces)
    assert text == expected
    until(lambda: here.service["status"]["epoch"] == 2, here.logs, WAIT_S)
    assert lost not in {node["host"] for node in here.service["status"]["nodes"]}


@pytest.mark.full
def test_a_killed_decode_process_costs_no_stream(scene: Any, operator: Any, until: Any) -> None:
    here = scene("a", "b", change=with_gateway)
    serving(here, until)
    expected = "".join(stream(here, "once upon", 150))
    pieces = stream(here, "once upon", 150)
    text = next(pieces)
    here.kubelet.of("demo-decode-1-1").process.kill()
    assert text + "".join(pieces) == expected


@pytest.mark.full
@pytest.mark.parametrize("surge", [True, False], ids=["beside", "drained first"])
def test_a_rolling_update_under_load_cuts_no_stream(
    scene: Any, operator: Any, until: Any, surge: bool
) -> None:
    def change(spec: dict[str, Any]) -> None:
        with_gateway(spec)
        spec["drain"]["surge"] = surge

    here = scene("a", "b", change=change)
    serving(here, until)
    prompts = [f"prompt {i}" for i in range(4)]
    expected = {prompt: "".join(stream(here, prompt, 100)) for prompt in prompts}
    updated = False

    def load(prompt: str) -> list[str]:
        """Texts of streams one after another; what never became a stream may be asked again."""
        texts = []
        while not updated or not texts:
            try:
                texts.append("".join(stream(here, prompt, 100)))
            except urllib.error.HTTPError as refusal:  # before the first byte of a stream
                if refusal.code != 503:
                    raise
                time.sleep(0.5)
        return texts

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        running = {prompt: pool.submit(load, prompt) for prompt in prompts}
        try:
            here.cluster.services.patch(
                body={"spec": {"decode": {"maxBatch": 32}}}, name="demo",
                namespace=here.namespace, content_type="application/merge-patch+json",
            )  # fmt: skip
            until(
                lambda: here.service["status"]["epoch"] == 2
                and here.condition("Ready").get("status") == "True",
                here.logs, WAIT_S,
            )  # fmt: skip
        finally:
            updated = True
        for prompt, future in running.items():
            assert set(future.result(WAIT_S)) == {expected[prompt]}
