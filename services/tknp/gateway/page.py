"""The page at `/`: one file, nothing loaded from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi.responses import HTMLResponse

# Scripts and styles of the page itself and calls to this host, nothing else.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
)


@cache
def _text() -> str:
    return (files("tknp.gateway") / "page.html").read_text(encoding="utf-8")


async def page() -> HTMLResponse:
    """The page. It asks for a key itself where one is needed."""
    return HTMLResponse(_text(), headers={"Content-Security-Policy": _POLICY})
