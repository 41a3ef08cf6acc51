"""A light client for servers that speak OpenAI's completion endpoints, with exact instants.

Knows connections, keep-alive, streams and how a request can end. Does not know what is asked
nor what is made of the answers. Instants are taken when bytes arrive, before they are parsed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from _wire import EventParser, MalformedResponse, ResponseParser

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    Sink = Callable[[ResponseParser, bytes, float], None]


@dataclass(slots=True)
class Answer:
    """How one request went. Instants are perf_counter seconds; None means: never came to it.

    ``error`` is its kind (``http_429``, ``connect``, ``stream:engine_error`` ...), None if the
    request completed or was closed by us on purpose (``is_cancelled``).
    """

    expected_tokens: int
    prompt_tokens_asked: int = 0
    due_at: float | None = None
    sent_at: float = 0.0
    ended_at: float = 0.0
    #: instant of each event that carried text
    text_at: list[float] = field(default_factory=list)
    status: int = 0
    error: str | None = None
    error_message: str = ""
    is_cancelled: bool = False
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is None and not self.is_cancelled


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response, for the requests that are not measured."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Closed(Exception):
    """The connection ended before the response did; ``had_bytes`` tells if any had come."""

    def __init__(self, message: str, *, had_bytes: bool) -> None:
        super().__init__(message)
        self.had_bytes = had_bytes


class _ClosedByUs(Exception):
    """The request was to be closed at this moment."""


class _Connection(asyncio.Protocol):
    """One socket, one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.uses = 0
        self._transport: asyncio.Transport
        self._parser: ResponseParser | None = None
        self._sink: Sink
        self._done: asyncio.Future[ResponseParser]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self.is_open = True

    def start(self, request: bytes, sink: Sink) -> asyncio.Future[ResponseParser]:
        """Write a request; the future holds the parser once its response is complete."""
        assert self._parser is None, "one request at a time"
        self.uses += 1
        self._parser = ResponseParser()
        self._sink = sink
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        parser = self._parser
        if parser is None:  # a server that speaks unasked is about to close
            self.abort()
            return
        try:
            body = parser.feed(data)
            if body:
                self._sink(parser, body, now)
        except (_ClosedByUs, MalformedResponse, ValueError) as error:
            self._end(error)
            self.abort()
            return
        if parser.is_complete:
            self._end(parser)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        parser = self._parser
        if parser is None:
            return
        try:
            parser.feed_eof()
        except MalformedResponse as error:
            self._end(Closed(str(exc or error), had_bytes=parser.status != 0))
        else:
            self._end(parser)

    def abort(self) -> None:
        """Close at once; a response in flight is given up without a result."""
        self.is_open = False
        self._parser = None
        self._transport.abort()

    def _end(self, result: ResponseParser | Exception) -> None:
        self._parser = None
        if self._done.done():
            return
        if isinstance(result, ResponseParser):
            self._done.set_result(result)
        else:
            self._done.set_exception(result)


class Client:
    """Connections to one server, kept alive and reused; an async context manager.

    ``base_url`` may end in ``/v1`` or not. Cancelling any method closes its connection.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"URL {base_url!r}: expected http://HOST:PORT or https://HOST:PORT")
        self.timeout_s = timeout_s
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._ssl else 80)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _exc: BaseException | None,
        _tb: TracebackType | None,
    ) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def request_bytes(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A whole request, ready to be written: made ahead of its instant."""
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + body

    async def get(self, path: str) -> Response:
        """Fetch a path; raises OSError, Closed, MalformedResponse or TimeoutError."""
        return await self.fetch(self.request_bytes("GET", path))

    async def fetch(self, request: bytes) -> Response:
        """Like ``get``, for any request."""
        body = bytearray()
        async with asyncio.timeout(self.timeout_s):
            parser = await self._exchange(request, lambda _parser, data, _now: body.extend(data))
        return Response(parser.status, parser.headers, bytes(body))

    async def generate(
        self,
        request: bytes,
        answer: Answer,
        *,
        stream: bool = True,
        close_after_events: int | None = None,
        close_after_s: float | None = None,
    ) -> None:
        """Send a completion request and fill in ``answer``; how it fails is in there, not raised.

        The connection is closed at the n-th event with text (0: as soon as the request is
        written) or after the given time, whichever is asked for, unless the answer ends before.
        """
        timeout_s = self.timeout_s if close_after_s is None else close_after_s
        reader = _AnswerReader(answer, stream=stream, events_max=close_after_events)
        answer.sent_at = perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                parser = await self._exchange(
                    request, reader.feed, close_at_once=close_after_events == 0
                )
            reader.finish(parser)
        except _ClosedByUs:
            answer.is_cancelled = True
        except asyncio.CancelledError:
            answer.is_cancelled = True
            raise
        except TimeoutError:
            if close_after_s is None:
                answer.error = "timeout"
                answer.error_message = f"no complete answer within {timeout_s:g} s"
            else:
                answer.is_cancelled = True
        except Closed as error:
            answer.error, answer.error_message = "connection_lost", str(error)
        except OSError as error:
            answer.error, answer.error_message = "connect", str(error)
        except (MalformedResponse, ValueError) as error:
            answer.error, answer.error_message = "malformed_response", str(error)
        finally:
            if not answer.is_complete:
                answer.ended_at = perf_counter()

    async def _exchange(
        self, request: bytes, sink: Sink, *, close_at_once: bool = False
    ) -> ResponseParser:
        """One request and its response; a kept connection that the server has just closed is
        replaced by another, as long as no byte of the response has come."""
        while True:
            connection = self._take_idle() or await self._connect()
            keep = False
            try:
                done = connection.start(request, sink)
                if close_at_once:
                    await asyncio.sleep(0)  # let the transport hand the bytes to the kernel
                    raise _ClosedByUs
                parser = await done
                keep = parser.keeps_alive
                return parser
            except Closed as error:
                if error.had_bytes or connection.uses == 1:
                    raise
            finally:
                if keep and connection.is_open:
                    self._idle.append(connection)
                else:
                    connection.abort()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        _transport, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._host, self._port, ssl=self._ssl
        )
        return connection


class _AnswerReader:
    """Turns the body of a completion response into an Answer while it comes in."""

    def __init__(self, answer: Answer, *, stream: bool, events_max: int | None) -> None:
        self._answer = answer
        self._stream = stream
        self._events_max = events_max
        self._events = EventParser()
        self._body = bytearray()
        self._is_done = False

    def feed(self, parser: ResponseParser, data: bytes, now: float) -> None:
        self._answer.ended_at = now
        if parser.status != 200 or not self._stream:
            self._body += data
            return
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                self._is_done = True
            else:
                self._read_chunk(payload, now)

    def finish(self, parser: ResponseParser) -> None:
        """The response is complete: was the answer?"""
        answer = self._answer
        answer.status = parser.status
        if parser.status != 200:
            answer.error = f"http_{parser.status}"
            answer.error_message = self._body[:400].decode(errors="replace")
        elif not self._stream:
            self._read_chunk(bytes(self._body), None)
        elif not self._is_done and answer.error is None:
            answer.error, answer.error_message = "no_done", "the stream ended without [DONE]"

    def _read_chunk(self, payload: bytes, now: float | None) -> None:
        """One JSON body: a chunk of a stream (text at ``now``) or a whole answer."""
        answer = self._answer
        try:
            chunk: dict[str, Any] = json.loads(payload.decode())
            if failure := chunk.get("error"):
                answer.error = f"stream:{failure.get('code') or failure.get('type')}"
                answer.error_message = str(failure.get("message"))
            if usage := chunk.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.completion_tokens = usage["completion_tokens"]
            choices = chunk.get("choices")
            if not choices:
                return
            choice = choices[0]
            if reason := choice.get("finish_reason"):
                answer.finish_reason = reason
            delta = choice.get("delta") or choice
            text = delta.get("text") or delta.get("content") or delta.get("reasoning_content")
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise MalformedResponse(f"unexpected answer {payload[:200]!r}: {error!r}") from error
        if text and now is not None:
            answer.text_at.append(now)
            if len(answer.text_at) == self._events_max:
                raise _ClosedByUs


def read_metrics(text: str) -> dict[str, float]:
    """The samples of a Prometheus page: ``name{labels}`` and also the sum per bare ``name``."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        samples[series] = float(value)
        name, brace, _ = series.partition("{")
        if brace:
            samples[name] = samples.get(name, 0.0) + float(value)
    return samples


def loop_factory() -> Any:
    """uvloop's loop where it is installed: somewhat cheaper than asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
