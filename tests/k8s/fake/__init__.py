"""A Kubernetes API server for tests: real HTTP, one process, everything in memory.

    HTTP request -> http.py (paths, content types, watches) -> api.py (verbs of one resource)
                      -> schema.py | merge.py | managed.py | selectors.py (pure) -> store.py

It keeps the contract that clients rely on: uid, resourceVersion, generation, optimistic locking,
server-side apply with managedFields and conflicts, status and scale subresources, selectors, watch
with bookmarks and 410 Gone, owner garbage collection, finalizers, graceful deletion of pods,
preconditions, CRDs with validation, defaulting and pruning, discovery. It does not schedule, run
controllers, authorise, admit by webhook, evaluate CEL, or answer with tables. Where it is stricter
or laxer than a real server beyond that, it is a defect of it: test_contract.py runs on both.
"""

from __future__ import annotations

from .http import FakeServer

__all__ = ["FakeServer"]
