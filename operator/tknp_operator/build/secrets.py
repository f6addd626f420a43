"""What pods of a pool show each other: a CA of its own, one certificate, two tokens; and API keys.

    NAME-ca         the CA and its key; made once, seen by the operator alone
    NAME-internal   its certificate, the pool's certificate and key, tokens; mounted by pods

The certificate is for every name under which a pod is dialled, as server and as client. It is made
anew, by the same CA and with the same tokens, when two thirds of its life are over: gateways trust
the CA and notice nothing. Pods read files when they start, so that a pool goes to a new epoch then.
A Secret that users name (`security.internalTlsSecret`) takes the certificate's place; who renews it
there is followed in the same way.
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

from tknp.errors import InvalidValue
from tknp_operator.api.service import Service
from tknp_operator.build.names import domain, metadata

LIFE, CA_LIFE = timedelta(days=365), timedelta(days=20 * 365)
FILES = ("ca.crt", "tls.crt", "tls.key")
_PEM = serialization.Encoding.PEM


def ca_name(service: Service) -> str:
    return f"{service.name}-ca"


def internal_name(service: Service) -> str:
    return f"{service.name}-internal"


def internal_volume(service: Service) -> dict[str, Any]:
    """The volume `internal` of every pod: certificate and tokens in one directory."""
    own, theirs = internal_name(service), service.spec.security.internal_tls_secret
    if theirs is None:
        return {"name": "internal", "secret": {"secretName": own, "defaultMode": 0o440}}
    tokens = [{"key": name, "path": name} for name in ("token", "api-token")]
    return {"name": "internal", "projected": {"defaultMode": 0o440, "sources": [
        {"secret": {"name": theirs, "items": [{"key": k, "path": k} for k in FILES]}},
        {"secret": {"name": own, "items": tokens}},
    ]}}  # fmt: skip


def ca_secret(service: Service, now: datetime) -> dict[str, Any]:
    """The pool's own CA and its key, which no pod sees, for as long as pools live."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{service.name[:48]} CA")])
    ca = (
        _certificate(name, name, key.public_key(), now, CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .sign(key, hashes.SHA256())
    )
    return _secret(service, ca_name(service), {
        "ca.crt": ca.public_bytes(_PEM), "ca.key": _private(key)})  # fmt: skip


def internal_secret(service: Service, ca: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Certificate, key and tokens. `ca`: the Secret of `ca_secret`."""
    tokens = {name: _encoded(secrets.token_hex(32).encode()) for name in ("token", "api-token")}
    made = _secret(service, internal_name(service), {})
    return {**made, "data": {**certificate(service, ca, now), **tokens}}


def certificate(service: Service, ca: Mapping[str, Any], now: datetime) -> dict[str, str]:
    """A certificate for a year from `now`: what a Secret's data has of it, the tokens apart."""
    ca_key = serialization.load_pem_private_key(base64.b64decode(ca["data"]["ca.key"]), None)
    issuer = x509.load_pem_x509_certificate(base64.b64decode(ca["data"]["ca.crt"]))
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise InvalidValue(
            "ca.key", ca_name(service), "is no key of the operator's: delete the Secret"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, service.name[:60])])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    made = (
        _certificate(name, issuer.subject, key.public_key(), now, LIFE)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in dialled(service)]),
                       critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
                       critical=False)
        .sign(ca_key, hashes.SHA256())
    )  # fmt: skip
    return {"ca.crt": ca["data"]["ca.crt"], "tls.crt": _encoded(made.public_bytes(_PEM)),
            "tls.key": _encoded(_private(key))}  # fmt: skip


def dialled(service: Service) -> list[str]:
    """Every name under which a pod of the pool is called."""
    at = f"{service.name}-coordinator"
    return [f"*.{domain(service)}", at, f"{at}.{service.namespace}",
            f"{at}.{service.namespace}.svc", "localhost"]  # fmt: skip


def renewal_due(secret: Mapping[str, Any], now: datetime) -> bool:
    """Whether two thirds of the certificate's life are over, or it can't be read at all."""
    try:
        found = x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"]))
    except (KeyError, ValueError):
        return True
    began, ends = found.not_valid_before_utc, found.not_valid_after_utc
    return now >= began + (ends - began) * 2 / 3


def shown_by(secret: Mapping[str, Any] | None) -> str:
    """Digits that differ where two pods of a pool show different certificates; empty: none."""
    return _digest(secret, "ca.crt", "tls.crt")


def trusted_by(secret: Mapping[str, Any] | None) -> str:
    """Digits that differ where two gateways trust different CAs; empty: none."""
    return _digest(secret, "ca.crt")


def incomplete(secret: Mapping[str, Any] | None) -> str:
    """What a Secret of somebody else's lacks; empty: nothing."""
    data = (secret or {}).get("data") or {}
    lacking = [name for name in FILES if not data.get(name)]
    return "" if not lacking else f"lacks {', '.join(lacking)}" if secret else "is not there"


def api_keys_secret(service: Service) -> dict[str, Any]:
    """One key for clients: `key` to read it, keys.yaml with its digest for the gateway."""
    key = f"sk-{secrets.token_hex(24)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    keys = {"keys": [{"name": "default", "sha256": digest}]}
    return _secret(service, f"{service.name}-api-keys", {
        "key": key.encode(), "keys.yaml": yaml.safe_dump(keys).encode()})  # fmt: skip


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime,
    life: timedelta,
) -> x509.CertificateBuilder:  # fmt: skip
    return (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - timedelta(minutes=5))
        .not_valid_after(now.astimezone(UTC) + life)
    )  # fmt: skip


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain)


def _digest(secret: Mapping[str, Any] | None, *names: str) -> str:
    data = (secret or {}).get("data") or {}
    text = "\n".join(str(data.get(name, "")) for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text.strip() else ""


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _secret(service: Service, name: str, values: Mapping[str, bytes]) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
        "metadata": metadata(service, name, "pool"),
        "data": {key: _encoded(value) for key, value in values.items()},
    }  # fmt: skip
