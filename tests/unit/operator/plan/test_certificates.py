"""Certificates of a pool: renewed on time, or a user's; followed by the drain protocol."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from cryptography import x509

CLOSE = "annotate ConfigMap/s-pool-1 closed"


def secret(world: Any, name: str = "s-internal") -> dict[str, str]:
    data: dict[str, str] = world.objects["Secret", name]["data"]
    return dict(data)


def test_a_renewed_certificate_takes_the_pool_to_a_new_epoch_and_gateways_stay(
    make_world: Callable[..., Any], spec: dict[str, Any]
) -> None:
    world = make_world({**spec, "drain": {"surge": False}})
    world.settle()
    before, gateway = secret(world), world.objects["Deployment", "s-gateway"]
    world.later(243 * 86_400)
    assert world.tick() == []
    world.later(2 * 86_400)
    assert world.tick() == ["merge Secret/s-internal"]
    assert world.tick() == [CLOSE, "delete Pod/s-coordinator-1"]
    assert world.condition("Progressing")["message"] == "the pool's certificate has been renewed"
    world.settle()
    after = secret(world)
    assert world.service["status"]["epoch"] == 2
    assert world.objects["Deployment", "s-gateway"] == gateway
    assert after["tls.crt"] != before["tls.crt"]
    assert all(after[key] == before[key] for key in ("ca.crt", "token", "api-token"))
    made, ca = (
        x509.load_pem_x509_certificate(base64.b64decode(after[key]))
        for key in ("tls.crt", "ca.crt")
    )
    made.verify_directly_issued_by(ca)
    assert "ca.key" not in after
    assert world.tick() == []


def test_an_epoch_of_an_older_operator_is_left_alone(world: Any) -> None:
    """Its ConfigMap does not say what its pods show."""
    world.settle()
    world.objects["ConfigMap", "s-pool-1"]["metadata"]["annotations"] = {}
    assert world.tick() == []


@pytest.fixture
def theirs(make_world: Callable[..., Any], spec: dict[str, Any]) -> Any:
    """A pool whose certificate is in a Secret of somebody else's."""
    spec |= {"security": {"internalTlsSecret": "mine"}, "drain": {"surge": False}}
    return make_world(spec)


def given(world: Any, **data: str) -> None:
    world.theirs = [{"kind": "Secret", "metadata": {"name": "mine", "uid": "x"}, "data": data}]


def test_a_secret_that_is_named_must_be_there_and_whole(theirs: Any) -> None:
    for _ in range(3):
        theirs.tick()
    assert "Secret mine is not there: make it" in theirs.condition("Placed")["message"]
    given(theirs, **{"tls.crt": "a", "tls.key": "b"})
    theirs.tick()
    assert "Secret mine lacks ca.crt: make it" in theirs.condition("Placed")["message"]
    assert not theirs.pods()


def test_a_secret_that_is_named_is_mounted_and_followed(theirs: Any) -> None:
    given(theirs, **{"ca.crt": "ca", "tls.crt": "a", "tls.key": "b"})
    theirs.settle()
    assert theirs.condition("Ready")["status"] == "True"
    gateway = theirs.objects["Deployment", "s-gateway"]["spec"]["template"]
    for pod in (*theirs.pods().values(), gateway):
        volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "internal")
        mounted = {
            item["path"]: source["secret"]["name"]
            for source in volume["projected"]["sources"] for item in source["secret"]["items"]
        }  # fmt: skip
        assert mounted == {"ca.crt": "mine", "tls.crt": "mine", "tls.key": "mine",
                           "token": "s-internal", "api-token": "s-internal"}  # fmt: skip
    theirs.later(300 * 86_400)
    assert theirs.tick() == []  # who made it renews it
    given(theirs, **{"ca.crt": "ca", "tls.crt": "c", "tls.key": "d"})
    assert theirs.tick() == [CLOSE, "delete Pod/s-coordinator-1"]
    theirs.settle()
    given(theirs, **{"ca.crt": "another", "tls.crt": "e", "tls.key": "f"})
    assert "apply Deployment/s-gateway" in theirs.tick()  # it trusts the CA that it has read
    theirs.settle()
    assert theirs.service["status"]["epoch"] == 3
