"""A Kubernetes API server for tests: real HTTP, one process, everything in memory.

    HTTP request -> http.py (who asks, paths, content types) -> api.py (verbs of one resource)
                      -> schema, rules, managed, builtin, definitions ... (pure) -> store.py

It keeps the contract that clients rely on: uid, resourceVersion, generation, optimistic locking,
server-side apply with managedFields and conflicts, status and scale subresources, selectors, watch
with bookmarks and 410 Gone, owner garbage collection, finalizers, graceful deletion of pods,
preconditions, CRDs with validation, rules in CEL, defaulting, pruning and tables, built-in kinds by
their OpenAPI schemas, RBAC, discovery. It does not schedule, run controllers or admit by webhook.
Where it is stricter or laxer than a real server beyond that, it is a defect of it: the
tests of the contract run on both.
"""

from __future__ import annotations

from .http import FakeServer

__all__ = ["FakeServer"]
