"""One connection to a client: uvicorn's, within bounds of time, size and number.

Knows bytes that come or go too slowly. Does not know what is asked or answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import structlog
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from skippy_sched.config import ServerSection
from skippy_sched.errors import RequestError
from skippy_sched.server.exchange import encode_json
from skippy_sched.server.problems import BadHttp, HeadTimeout, HeadTooLarge, error_object

log = structlog.get_logger("skippy_sched.connection")

#: Bytes that come without a body's: heads with long cookies have a tenth of it.
HEAD_BYTES_MAX = 64 * 2**10
#: Connections beyond the limit that are told so; further ones are closed without a word.
SURPLUS_MAX = 256


@dataclass(slots=True)
class Bounds:
    """What holds for all connections; changed while they are open."""

    section: ServerSection
    connections_max: int
    #: told the reason of each connection that is cut
    on_cut: Callable[[str], None]


class Connection(HttpToolsProtocol):
    """uvicorn alone waits for ever for a head, and for a client that does not read."""

    def __init__(self, bounds: Bounds, **given: Any) -> None:
        super().__init__(**given)
        self._bounds = bounds
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        #: bytes since the last head was complete or a part of a body came
        self._headless_bytes = 0
        #: bytes that the client had left unread when its time began
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        surplus = len(self.connections) - self._bounds.connections_max
        if surplus > SURPLUS_MAX:
            self._cut("too_many_connections")
            return
        self.app_state = {"is_surplus": surplus > 0}
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = None

    # --- in -------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        self._headless_bytes += len(data)
        super().data_received(data)
        if self._headless_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse(HeadTooLarge(f"a request's head may have {HEAD_BYTES_MAX} bytes"))

    def on_headers_complete(self) -> None:
        self._headless_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.cycle is None or self.cycle.scope is not self.scope:
            super().on_header(name, value)  # others are trailers, which nobody asks for

    def on_body(self, body: bytes) -> None:
        self._headless_bytes = 0
        super().on_body(body)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            wait_s = self._bounds.section.header_timeout_s
            self._head_timer = self.loop.call_later(wait_s, self._on_head_late)

    def _on_head_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if not self._headless_bytes:
            self.transport.close()  # opened in advance and not used
            return
        wait_s = self._bounds.section.header_timeout_s
        self._refuse(HeadTimeout(f"the request's head did not arrive within {wait_s:g} s"))

    def send_400_response(self, msg: str) -> None:
        """What uvicorn answers to what is no HTTP."""
        self._refuse(BadHttp(msg))

    def _refuse(self, error: RequestError) -> None:
        """Answer without a request, and close."""
        self._bounds.on_cut(error.code or str(error.http_status))
        log.info("connection_refused", client=self.client, code=error.code, message=error.message)
        cycle = self.cycle
        is_answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if is_answering or self.pipeline:
            self.transport.abort()  # in the middle of another answer
            return
        body = encode_json(error_object(error)).encode()
        phrase = HTTPStatus(error.http_status).phrase
        self.transport.write(
            f"HTTP/1.1 {error.http_status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        self._close()

    # --- out ------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_reader()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._close()

    def _close(self) -> None:
        """The transport waits for the client to read what is left: not for ever."""
        self.transport.close()
        self._expect_reader()

    def _expect_reader(self) -> None:
        if self._write_timer is None:
            self._unread = self.transport.get_write_buffer_size()
            wait_s = self._bounds.section.write_timeout_s
            self._write_timer = self.loop.call_later(wait_s, self._on_reader_late)

    def _on_reader_late(self) -> None:
        """Who has taken less than it was given room for does not read, or hardly."""
        self._write_timer = None
        if not (self.flow.write_paused or self.transport.is_closing()):
            return
        if self._unread - self.transport.get_write_buffer_size() >= HIGH_WATER_LIMIT:
            self._expect_reader()  # a large answer to a slow line
            return
        self._cut("slow_reader")

    def _cut(self, reason: str) -> None:
        """What waits to be written is dropped; a request under way learns that nobody is there."""
        self._bounds.on_cut(reason)
        exchange = None if self.cycle is None else self.cycle.scope.get("skippy.exchange")
        log.info(
            "connection_cut",
            reason=reason,
            client=self.client,
            request_id=getattr(exchange, "request_id", None),
            unread_bytes=self.transport.get_write_buffer_size(),
        )
        self.transport.abort()
