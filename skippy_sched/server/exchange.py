"""One HTTP request and its response over the bare ASGI calls.

Knows bodies and their limits, JSON answers, event streams, and clients that go away. Does not
know what is asked or answered.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from urllib.parse import parse_qs

from starlette.types import Message, Receive, Scope, Send

from skippy_sched.errors import InvalidRequest
from skippy_sched.server.problems import BodyTimeout, ClientGone, PayloadTooLarge

Header = tuple[bytes, bytes]

#: Of a body that is too large, so much more is read and dropped before the answer: a client that
#: is still sending would otherwise see a reset connection in place of the answer.
OVERRUN_BYTES_MAX = 8 * 2**20
OVERRUN_TIMEOUT_S = 2.0

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Exchange:
    """``status`` is that of the response, 0 until it has started."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.request_id = ""
        self.status = 0
        self.is_complete = False
        #: the client closed the connection; what is sent from now on is lost
        self.is_gone = False
        #: headers for the response, whatever it will be
        self.headers: list[Header] = []
        #: told of tokens as they are used, for the rates of a key
        self.charge: Callable[[int], None] = lambda tokens: None
        self._receive = receive
        self._send = send

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    @property
    def is_local(self) -> bool:
        """Whether it came over a Unix socket or from this machine."""
        client = self.scope.get("client")
        return not client or ipaddress.ip_address(client[0]).is_loopback

    @property
    def is_surplus(self) -> bool:
        """Whether its connection is one more than there should be."""
        return bool(self.scope.get("state", {}).get("is_surplus"))

    def header(self, name: bytes) -> str | None:
        for key, value in self.scope["headers"]:
            if key == name:
                text: str = value.decode("latin-1")
                return text
        return None

    def query(self, *known: str) -> dict[str, str]:
        """The address's parameters, of these names; raises InvalidRequest for others."""
        text = self.scope["query_string"].decode("latin-1")
        found = {
            name: values[-1] for name, values in parse_qs(text, keep_blank_values=True).items()
        }
        for name in found:
            if name not in known:
                raise InvalidRequest(
                    f"{self.path[:80]} has no parameter {name[:40]!r}, only {', '.join(known)}",
                    param=name[:40],
                )
        return found

    # --- in -------------------------------------------------------------------------------------

    async def body(self, limit: int, timeout_s: float) -> bytes:
        """The request's body; raises PayloadTooLarge, BodyTimeout or ClientGone."""
        announced = self.header(b"content-length") or ""
        if announced.isdigit() and int(announced) > limit:
            await self._drop_overrun()
            raise PayloadTooLarge(int(announced), limit)
        parts: list[bytes] = []
        size = 0
        more = True
        try:
            async with asyncio.timeout(timeout_s):
                while more and size <= limit:
                    message = await self._next_part()
                    part = message.get("body", b"")
                    size += len(part)
                    parts.append(part)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise BodyTimeout(
                f"the body did not arrive within {timeout_s:g} s (server.body_timeout_s; "
                f"{size} bytes came)"
            ) from None
        if size > limit:
            parts.clear()
            if more:
                await self._drop_overrun()
            raise PayloadTooLarge(None, limit)
        return b"".join(parts)

    async def _next_part(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_gone = True
            raise ClientGone
        return message

    async def _drop_overrun(self) -> None:
        if self.header(b"expect") is not None:
            return  # the client has not begun to send and waits for our word
        dropped = 0
        try:
            async with asyncio.timeout(OVERRUN_TIMEOUT_S):
                more = True
                while more and dropped < OVERRUN_BYTES_MAX:
                    message = await self._next_part()
                    dropped += len(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            return

    @asynccontextmanager
    async def watched(
        self, on_gone: Callable[[], None], idle_s: float, on_idle: Callable[[], Iterable[bytes]]
    ) -> AsyncIterator[None]:
        """Within the block, call ``on_gone`` as soon as the client closes the connection.

        ``send`` to a closed connection does not fail, so nothing else would tell. Each ``idle_s``
        what ``on_idle`` gives is written. To be entered after the body has been read.
        """
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(self._watch(on_gone, idle_s, on_idle))
            try:
                yield
            except Exception as error:
                # Outside of the group it stays what it is.
                failure = error
            finally:
                watcher.cancel()
        if failure is not None:
            raise failure

    async def _watch(
        self, on_gone: Callable[[], None], idle_s: float, on_idle: Callable[[], Iterable[bytes]]
    ) -> None:
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    message = await self._receive()
            except TimeoutError:
                for data in on_idle():
                    await self.write(data)
                continue
            if message["type"] == "http.disconnect":
                self.is_gone = True
                on_gone()
                return

    # --- out ------------------------------------------------------------------------------------

    async def answer(self, status: int, body: bytes, content_type: bytes = b"text/plain") -> None:
        """Send a whole response."""
        self.headers.append((b"content-type", content_type))
        self.headers.append((b"content-length", b"%d" % len(body)))
        await self._start(status)
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def answer_json(self, status: int, value: object) -> None:
        await self.answer(status, encode_json(value).encode(), b"application/json")

    async def write(self, data: bytes) -> None:
        """Write a part of an event stream; waits while the client reads too slowly.

        The status goes out with the first part, so that a failure before it gets its own.
        """
        if self.status == 0:
            self.headers += (
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            )
            await self._start(HTTPStatus.OK)
        if not self.is_complete:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End the event stream; idempotent."""
        if not self.is_complete:
            self.is_complete = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, status: int) -> None:
        assert self.status == 0, "a response starts once"
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": self.headers})
