"""Who is asking, and whether roles and bindings let them.

A request has the token of an administrator, who may everything, or one that TokenRequest has made
for a ServiceAccount; kubectl sends no token without TLS, and is an administrator. What an account
has been granted is decided by the stored Roles, ClusterRoles and bindings at that moment; what it
has used of that is kept, for tests to compare.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import Refused
from .store import Store

ADMINISTRATOR = "fake"
_GROUP = "rbac.authorization.k8s.io"
Used = tuple[str, str, str]  # group, resource or resource/subresource, verb


@dataclass(frozen=True)
class Attributes:
    """What a request wants to do. `resource`: with its subresource, as rules name it."""

    group: str
    resource: str
    verb: str
    namespace: str = ""
    name: str = ""


class Rights:
    """`used`: what accounts have been let do, by account."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._accounts: dict[str, tuple[str, str]] = {}
        self.used: dict[tuple[str, str], set[Used]] = {}

    def token(self, namespace: str, name: str) -> str:
        """A token of the ServiceAccount `name`."""
        made = f"fake-{namespace}-{name}"
        with self._lock:
            self._accounts[made] = namespace, name
        return made

    def check(self, token: str, wanted: Attributes) -> None:
        """Raise Refused 401 for a token that nobody gave out, 403 where no rule allows it."""
        if token in ("", ADMINISTRATOR):
            return
        account = self._accounts.get(token)
        if account is None:
            raise Refused(401, "Unauthorized")
        if not any(_covers(rule, wanted) for rule in self._rules(account, wanted.namespace)):
            user = f"system:serviceaccount:{account[0]}:{account[1]}"
            where = f' in the namespace "{wanted.namespace}"' if wanted.namespace else (
                " at the cluster scope")  # fmt: skip
            raise Refused(403, f'{wanted.resource} "{wanted.name}" is forbidden: User "{user}" '
                               f'cannot {wanted.verb} resource "{wanted.resource}" in API group '
                               f'"{wanted.group}"{where}')  # fmt: skip
        with self._lock:
            used = self.used.setdefault(account, set())
            used.add((wanted.group, wanted.resource, wanted.verb))

    def _rules(self, account: tuple[str, str], namespace: str) -> Iterator[dict[str, Any]]:
        """Rules that hold for `account` in `namespace`, or for what has none."""
        with self._store.lock:
            bindings = self._store.all((_GROUP, "clusterrolebindings"))
            if namespace:
                bindings += self._store.all((_GROUP, "rolebindings"), namespace)
            for binding in bindings:
                if not any(_is(subject, account) for subject in binding.get("subjects") or ()):
                    continue
                role = binding["roleRef"]
                of_cluster = role["kind"] == "ClusterRole"
                key = _GROUP, "clusterroles" if of_cluster else "roles"
                found = self._store.get(key, ("" if of_cluster else namespace, role["name"]))
                yield from (found or {}).get("rules") or ()


def _is(subject: dict[str, Any], account: tuple[str, str]) -> bool:
    mine = subject.get("namespace"), subject["name"]
    return subject["kind"] == "ServiceAccount" and mine == account


def _covers(rule: dict[str, Any], wanted: Attributes) -> bool:
    """A rule with names covers no request that has none, so neither `create` nor `list`."""
    names = rule.get("resourceNames")
    return (
        bool({wanted.group, "*"} & set(rule.get("apiGroups") or ()))
        and bool({wanted.resource, "*"} & set(rule.get("resources") or ()))
        and bool({wanted.verb, "*"} & set(rule["verbs"]))
        and (not names or wanted.name in names)
    )
