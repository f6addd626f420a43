"""What pods of a pool show each other: a CA of its own, one certificate, two tokens; and API keys.

Made once and kept. The certificate is for every name under which a pod is dialled, as server and
as client. `renewal_due` says when a new one is needed; pods read files when they start, so a
renewal comes with a new epoch.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tknp_operator.api.service import Service
from tknp_operator.build.names import domain, metadata

LIFE = timedelta(days=365)
RENEW_BEFORE = timedelta(days=60)


def internal_secret(service: Service, now: datetime) -> dict[str, Any]:
    """CA, certificate, key and tokens, for a year from `now`."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{service.name[:48]} CA")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, service.name[:60])])
    ca = (
        _certificate(ca_name, ca_name, ca_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False)
        .sign(ca_key, hashes.SHA256())
    )
    behind, at = domain(service), f"{service.name}-coordinator"
    dialled = [f"*.{behind}", at, f"{at}.{service.namespace}", f"{at}.{service.namespace}.svc",
               "localhost"]  # fmt: skip
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _certificate(name, ca_name, key.public_key(), now)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in dialled]), False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
                       critical=False)
        .sign(ca_key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    return _secret(service, f"{service.name}-internal", {
        "ca.crt": ca.public_bytes(pem), "tls.crt": certificate.public_bytes(pem),
        "tls.key": key.private_bytes(pem, serialization.PrivateFormat.PKCS8,
                                     serialization.NoEncryption()),
        "token": secrets.token_hex(32).encode(), "api-token": secrets.token_hex(32).encode(),
    })  # fmt: skip


def renewal_due(secret: Mapping[str, Any], now: datetime) -> bool:
    """Whether the certificate ends soon, or can't be read at all."""
    try:
        pem = base64.b64decode(secret["data"]["tls.crt"])
        return x509.load_pem_x509_certificate(pem).not_valid_after_utc - now < RENEW_BEFORE
    except (KeyError, ValueError):
        return True


def api_keys_secret(service: Service) -> dict[str, Any]:
    """One key for clients: `key` to read it, keys.yaml with its digest for the gateway."""
    key = f"sk-{secrets.token_hex(24)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    keys = {"keys": [{"name": "default", "sha256": digest}]}
    return _secret(service, f"{service.name}-api-keys", {
        "key": key.encode(), "keys.yaml": yaml.safe_dump(keys).encode()})  # fmt: skip


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - timedelta(minutes=5))
        .not_valid_after(now.astimezone(UTC) + LIFE)
    )  # fmt: skip


def _secret(service: Service, name: str, values: Mapping[str, bytes]) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
        "metadata": metadata(service, name, "pool"),
        "data": {key: base64.b64encode(value).decode() for key, value in values.items()},
    }  # fmt: skip
