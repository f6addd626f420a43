"""What pods show each other, read back with the library that made it."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from cryptography import x509

from tknp_operator.api.service import Service, parse
from tknp_operator.build.secrets import (
    api_keys_secret,
    ca_secret,
    certificate,
    internal_secret,
    renewal_due,
    shown_by,
    trusted_by,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def service() -> Service:
    return parse({
        "metadata": {"name": "s", "namespace": "ns", "uid": "u-0"},
        "spec": {"image": "i", "model": {"source": {"builtin": "smollm2"}},
                 "decode": {"nodes": 2, "device": "cpu"}},
    })  # fmt: skip


def test_the_certificate_is_for_every_name_that_is_dialled(service: Service) -> None:
    data = internal_secret(service, ca_secret(service, NOW), NOW)["data"]
    ca, certificate = (
        x509.load_pem_x509_certificate(base64.b64decode(data[name]))
        for name in ("ca.crt", "tls.crt")
    )
    certificate.verify_directly_issued_by(ca)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    dialled = names.get_values_for_type(x509.DNSName)
    assert {"*.s-pool.ns.svc", "s-coordinator.ns.svc", "localhost"} <= set(dialled)
    assert data["token"] != data["api-token"]


def test_it_is_renewed_when_two_thirds_of_its_life_are_over(service: Service) -> None:
    ca = ca_secret(service, NOW)
    secret = internal_secret(service, ca, NOW)
    assert not renewal_due(secret, NOW)
    assert not renewal_due(secret, NOW + timedelta(days=243))
    assert renewal_due(secret, NOW + timedelta(days=244))
    assert renewal_due({"data": {}}, NOW)
    later = NOW + timedelta(days=244)
    renewed = {"data": {**secret["data"], **certificate(service, ca, later)}}
    assert not renewal_due(renewed, later)
    assert shown_by(renewed) != shown_by(secret)
    assert trusted_by(renewed) == trusted_by(secret)  # gateways go on
    assert renewed["data"]["token"] == secret["data"]["token"]
    assert "ca.key" not in renewed["data"]
    assert trusted_by(None) == shown_by({"data": {}}) == ""


def test_the_gateway_gets_the_digest_of_the_key_alone(service: Service) -> None:
    data = {k: base64.b64decode(v) for k, v in api_keys_secret(service)["data"].items()}
    (entry,) = yaml.safe_load(data["keys.yaml"])["keys"]
    assert entry["sha256"] == hashlib.sha256(data["key"]).hexdigest()
    assert data["key"] not in data["keys.yaml"]
