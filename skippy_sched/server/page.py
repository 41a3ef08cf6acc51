"""The live web page: a few static files, served from memory.

Holds no facts: the page asks ``/admin/live`` for them, with the key that a person gives it.
"""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

from skippy_sched.server.exchange import Exchange
from skippy_sched.server.problems import NotFound

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
#: Nothing from elsewhere, nothing inline, in nobody's frame.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class Page:
    """Reads the files once; the names in the folder are the only ones there are."""

    def __init__(self) -> None:
        self._files = {
            path.name: (_TYPES[path.suffix], path.read_bytes()) for path in _FOLDER.iterdir()
        }

    async def answer(self, exchange: Exchange, name: str) -> None:
        found = self._files.get(name)
        if found is None:
            raise NotFound(f"the page has no file {name[:80]!r}")
        content_type, body = found
        exchange.headers += _HEADERS
        await exchange.answer(HTTPStatus.OK, body, content_type)
