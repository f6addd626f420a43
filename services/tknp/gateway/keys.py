"""API keys and what each may ask for.

The file is YAML: a list under `keys`, each with a `name` for logs and metrics, the `key` itself or
its `sha256`, and limits:

    keys:
      - name: research
        sha256: 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8
        max_requests: 64            # in flight at once
        max_tokens: 500000          # of prompts plus outputs asked for, in flight at once
        priority: 0                 # highest that its requests may ask for

Keys are compared by digest in constant time, all of them whichever fits, and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import yaml

from tknp.errors import CapacityError, InvalidValue, TknpError
from tknp.gateway.ledger import Limit, Use

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIELDS = frozenset({"name", "key", "sha256", "max_requests", "max_tokens", "priority"})


class Unauthenticated(TknpError):
    """No key, or one that nobody has."""

    status = "UNAUTHENTICATED"


@dataclass(eq=False)
class Tenant:
    """Who holds a key. `priority`: highest that its requests may ask for.

    `used`: in flight at this replica, kept by `tknp.gateway.limits`.
    """

    name: str
    digest: bytes = b""
    limit: Limit = field(default_factory=Limit)
    priority: int = 0
    used: Use = field(default_factory=Use)

    def refuse(self, held: Use, more: Use) -> NoReturn:
        """Raises InvalidValue if `more` can't ever be had, else CapacityError: another time.

        `held`: what is in flight.
        """
        most = self.limit
        if most.requests is not None and more.requests > most.requests:
            raise InvalidValue(
                "n", more.requests, f"{self.name} may have {most.requests} requests in flight"
            )
        if most.tokens is not None and more.tokens > most.tokens:
            raise InvalidValue(
                "max_tokens", more.tokens, f"prompts plus outputs; {self.name} may have "
                f"{most.tokens} in flight",
            )  # fmt: skip
        raise CapacityError(
            f"{held.requests} requests of {held.tokens} tokens of {self.name} are in flight and "
            f"{more.requests} of {more.tokens} more are asked for, max_requests={most.requests}, "
            f"max_tokens={most.tokens}: come again later"
        )


class Keys:
    """Every key. Without any, everybody is the same nameless tenant without limits."""

    def __init__(self, tenants: list[Tenant] | None = None) -> None:
        self._tenants = tenants
        self._anybody = Tenant("anybody", priority=2**31 - 1)

    @property
    def tenants(self) -> list[Tenant]:
        return [self._anybody] if self._tenants is None else list(self._tenants)

    def tenant(self, authorization: str | None) -> Tenant:
        """Who sends `authorization`, the value of that header; raises Unauthenticated."""
        if self._tenants is None:
            return self._anybody
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("no API key: send `Authorization: Bearer KEY`")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found = [t for t in self._tenants if hmac.compare_digest(t.digest, digest)]
        if not found:
            raise Unauthenticated("the API key is not known")
        return found[0]


def read_keys(path: str | None) -> Keys:
    """Keys of the file at `path`; None: nobody is asked for one. Raises InvalidValue."""
    if path is None:
        return Keys()
    try:
        data = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        kind = type(error).__name__  # its text may quote a key
        raise InvalidValue("keys_file", path, f"cannot be read: {kind}") from None
    items = data.get("keys") if isinstance(data, Mapping) else None
    if not isinstance(items, list) or not items:
        raise InvalidValue("keys_file", path, "expected a list of at least one key under `keys`")
    tenants = [_tenant(index, item) for index, item in enumerate(items)]
    for name in ("name", "digest"):
        values = [getattr(tenant, name) for tenant in tenants]
        if len(set(values)) != len(values):
            raise InvalidValue("keys_file", path, f"two keys have the same {name}")
    return Keys(tenants)


def _tenant(index: int, item: object) -> Tenant:
    place = f"keys[{index}]"
    if not isinstance(item, Mapping):
        raise InvalidValue(place, type(item).__name__, "expected a mapping")
    for name in item:
        if name not in _FIELDS:
            raise InvalidValue(f"{place}.{name}", "...", f"known are {', '.join(sorted(_FIELDS))}")
    name, key, digest = item.get("name"), item.get("key"), item.get("sha256")
    if not isinstance(name, str) or not name:
        raise InvalidValue(f"{place}.name", name, "needs a name")
    if (key is None) == (digest is None):
        raise InvalidValue(place, name, "give either key or sha256")
    if key is not None:
        if not isinstance(key, str) or len(key) < 16:
            raise InvalidValue(f"{place}.key", "...", "must be text of at least 16 characters")
        digest = hashlib.sha256(key.encode()).hexdigest()
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise InvalidValue(f"{place}.sha256", "...", "must be 64 lower-case hexadecimal digits")
    limits: dict[str, int | None] = {}
    for entry, low in (("max_requests", 1), ("max_tokens", 1), ("priority", -(2**31))):
        value = item.get(entry)
        if value is not None and (type(value) is not int or value < low):
            raise InvalidValue(f"{place}.{entry}", value, f"a whole number of at least {low}")
        limits[entry] = value
    limit = Limit(limits["max_requests"], limits["max_tokens"])
    return Tenant(name, bytes.fromhex(digest), limit, limits["priority"] or 0)
