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
from dataclasses import dataclass
from pathlib import Path

import yaml

from tknp.errors import CapacityError, InvalidValue, TknpError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIELDS = frozenset({"name", "key", "sha256", "max_requests", "max_tokens", "priority"})


class Unauthenticated(TknpError):
    """No key, or one that nobody has."""

    status = "UNAUTHENTICATED"


@dataclass(eq=False)
class Tenant:
    """Who holds a key. `max_requests`, `max_tokens`: in flight at once; None: no limit."""

    name: str
    digest: bytes = b""
    max_requests: int | None = None
    max_tokens: int | None = None
    priority: int = 0
    requests: int = 0
    tokens: int = 0

    def admit(self, tokens: int) -> None:
        """Count a request of `tokens` in; raises CapacityError where a limit is reached."""
        if self.max_requests is not None and self.requests >= self.max_requests:
            raise CapacityError(
                f"{self.requests} requests of {self.name} are in flight, "
                f"max_requests={self.max_requests}: come again later"
            )
        if self.max_tokens is not None and self.tokens + tokens > self.max_tokens:
            if tokens > self.max_tokens:
                raise InvalidValue(
                    "max_tokens", tokens, f"prompt plus output; {self.name} may have "
                    f"{self.max_tokens} in flight",
                )  # fmt: skip
            raise CapacityError(
                f"{self.tokens} tokens of {self.name} are in flight and {tokens} more are asked "
                f"for, max_tokens={self.max_tokens}: come again later"
            )
        self.requests += 1
        self.tokens += tokens

    def leave(self, tokens: int) -> None:
        """A request that was admitted with `tokens` has ended."""
        self.requests -= 1
        self.tokens -= tokens


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
    for field, low in (("max_requests", 1), ("max_tokens", 1), ("priority", -(2**31))):
        value = item.get(field)
        if value is not None and (type(value) is not int or value < low):
            raise InvalidValue(f"{place}.{field}", value, f"a whole number of at least {low}")
        limits[field] = value
    return Tenant(
        name, bytes.fromhex(digest), limits["max_requests"], limits["max_tokens"],
        limits["priority"] or 0,
    )  # fmt: skip
