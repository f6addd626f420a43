"""Server-sent events, as far as LLM servers use them: the data of each event."""

from __future__ import annotations


class Events:
    """Bytes in, whole events' data out. Events may be cut anywhere, and of any size."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        rest = self._rest + data if self._rest else data
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        *events, self._rest = rest.split(b"\n\n")
        return [found for event in events if (found := _data(event))]

    def end(self) -> list[bytes]:
        """An event that the end of the stream closes."""
        found, self._rest = _data(self._rest), b""
        return [found] if found else []


def _data(event: bytes) -> bytes:
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = (line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)
