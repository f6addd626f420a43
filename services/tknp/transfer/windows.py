"""Which writer may write into which pages of an owner rank right now. Pure.

    Begin -> open(key, writer, pages)      chunks of (key, writer) into `pages` are accepted
    Complete, Abort -> close(key, writer)  every later chunk is refused

A gRPC chunk may arrive after its transfer was aborted and its pages went to another request; with
no window it is refused before a byte is written. One-sided writes (NIXL) do not pass here, which is
why an owner quarantines their pages instead.

Windows carry no epoch: pages are keyed by (request, attempt) and survive an epoch change, and an
owner that was restarted has no window.

Not thread-safe: use it on the thread that applies chunks, so that no chunk is half applied when its
window closes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tknp.errors import ProtocolError


class KeyLike(Protocol):
    """A request's attempt, as the message RequestKey or a plain tuple names it."""

    @property
    def request_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...


class WriteWindows:
    """The open windows of one owner rank."""

    def __init__(self) -> None:
        self._pages: dict[tuple[str, int, str], frozenset[int]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def open(self, key: KeyLike, writer: str, pages: Iterable[int]) -> None:
        """Let `writer` write the pages of `key`; replaces its former window.

        Raises ProtocolError if another open window has one of them.
        """
        own = (key.request_id, key.attempt, writer)
        wanted = frozenset(pages)
        for other, held in self._pages.items():
            if other != own and held & wanted:
                raise ProtocolError(
                    f"page {min(held & wanted)} is being written by {other[2]} for "
                    f"{other[0]}/{other[1]}: abort that transfer before {writer} begins"
                )
        self._pages[own] = wanted

    def close(self, key: KeyLike, writer: str) -> None:
        """Refuse whatever still arrives from `writer` for `key`. Idempotent."""
        self._pages.pop((key.request_id, key.attempt, writer), None)

    def check(self, key: KeyLike, writer: str, pages: Iterable[int]) -> None:
        """Raise ProtocolError unless `writer` may write all of `pages` for `key`."""
        window = self._pages.get((key.request_id, key.attempt, writer))
        if window is None:
            raise ProtocolError(
                f"writer {writer!r} has no open transfer for {key.request_id}/{key.attempt}: it "
                "was never begun, or has ended"
            )
        for page in pages:
            if page not in window:
                raise ProtocolError(
                    f"page {page} is not among those of {key.request_id}/{key.attempt} that "
                    f"writer {writer!r} may write"
                )
