"""The load test's client: its wire parsers, and how each way a request can end is seen."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from _client import Answer, Client, read_metrics
from _wire import EventParser, MalformedResponse, ResponseParser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

EVENTS = (
    b": ping\r\n\r\n"
    b'data: {"choices":[{"index":0,"text":"a\xc3\xa9","finish_reason":null}]}\n\n'
    b"event: note\ndata:two\ndata: lines\n\n"
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\r\n\r\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)
STREAM = EVENTS.replace(b"event: note\ndata:two\ndata: lines\n\n", b"")


def chunked(body: bytes, size: int) -> bytes:
    """A chunked response with an interim one before it, a chunk extension and a trailer."""
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    coded = b"".join(b"%X;n=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        + coded
        + b"0\r\nX-Trailer: 1\r\n\r\n"
    )


def with_length(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("size", [37, 10_000])
def test_a_chunked_response_split_at_every_byte_gives_the_same_body(size: int) -> None:
    raw = chunked(EVENTS, size)
    for cut in range(len(raw) + 1):
        response = ResponseParser()
        body = response.feed(raw[:cut]) + response.feed(raw[cut:])
        assert (body, response.status, response.is_complete) == (EVENTS, 200, True)
        assert response.keeps_alive


def test_a_chunked_response_fed_byte_by_byte_gives_the_same_body() -> None:
    response = ResponseParser()
    raw = chunked(EVENTS, 13)
    assert b"".join(response.feed(raw[i : i + 1]) for i in range(len(raw))) == EVENTS
    assert response.is_complete


def test_events_split_at_every_byte_are_the_same_events() -> None:
    whole = EventParser().feed(EVENTS)
    assert [whole[1], whole[-1]] == [b"two\nlines", b"[DONE]"]
    assert len(whole) == 5
    for cut in range(len(EVENTS) + 1):
        events = EventParser()
        assert whole == events.feed(EVENTS[:cut]) + events.feed(EVENTS[cut:])


def test_an_event_without_its_blank_line_is_not_delivered() -> None:
    assert EventParser().feed(b"data: half\n") == []


def test_a_response_with_a_length_ends_exactly_there() -> None:
    response = ResponseParser()
    assert response.feed(with_length(429, b"abc", "Connection: close")) == b"abc"
    assert (response.status, response.is_complete, response.keeps_alive) == (429, True, False)
    with pytest.raises(MalformedResponse, match="after the end"):
        response.feed(b"d")


def test_a_response_without_length_ends_when_the_server_closes() -> None:
    response = ResponseParser()
    assert response.feed(b"HTTP/1.1 200 OK\r\n\r\nabc") == b"abc"
    assert not response.is_complete
    response.feed_eof()
    assert response.is_complete
    assert not response.keeps_alive


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200 OK\r\n", chunked(EVENTS, 9)[:-2]])
def test_a_close_before_the_end_of_a_response_is_an_error(raw: bytes) -> None:
    response = ResponseParser()
    response.feed(raw)
    with pytest.raises(MalformedResponse, match="closed in the middle"):
        response.feed_eof()


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"a" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedResponse):
        ResponseParser().feed(raw)


# the client, against a server that plays a script


@asynccontextmanager
async def a_server(*replies: bytes | None) -> AsyncIterator[tuple[Client, list[int]]]:
    """Answers the n-th request by the n-th reply; None closes first. Lists requests per socket."""
    script = iter(replies)
    requests_per_socket: list[int] = []
    ends: list[asyncio.Future[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        socket = len(requests_per_socket)
        requests_per_socket.append(0)
        ends.append(asyncio.get_running_loop().create_future())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                requests_per_socket[socket] += 1
                reply = next(script)
                if reply is None:
                    break
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            ends[socket].set_result(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        async with Client(f"http://127.0.0.1:{port}/v1") as client:
            yield client, requests_per_socket
        await asyncio.gather(*ends)


async def ask(client: Client, **close: Any) -> Answer:
    answer = Answer(1)
    await client.generate(client.request_bytes("POST", "/v1/completions", b"{}"), answer, **close)
    return answer


async def test_a_whole_stream_is_measured_and_its_connection_reused() -> None:
    async with a_server(chunked(STREAM, 11), chunked(STREAM, 999)) as (client, sockets):
        for _ in range(2):
            answer = await ask(client)
            assert answer.is_complete, answer
            assert (answer.prompt_tokens, answer.completion_tokens) == (3, 1)
            assert (answer.finish_reason, len(answer.text_at)) == ("length", 1)
            assert answer.sent_at <= answer.text_at[0] <= answer.ended_at
        assert sockets == [2]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (with_length(429, b'{"error":{"message":"full"}}'), "http_429"),
        (chunked(STREAM.replace(b"data: [DONE]\n\n", b""), 50), "no_done"),
        (chunked(b'data: {"error":{"code":"engine_error","message":"m"}}\n\ndata: [DONE]\n\n', 50),
         "stream:engine_error"),
        (chunked(b"data: [1]\n\n", 50), "malformed_response"),
        (b"nonsense\r\n\r\n", "malformed_response"),
        (None, "connection_lost"),
    ],
)  # fmt: skip
async def test_each_way_to_fail_has_its_kind(reply: bytes | None, error: str) -> None:
    async with a_server(reply) as (client, _sockets):
        answer = await ask(client)
        assert error == answer.error, answer
        assert not answer.is_complete


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    async with a_server(chunked(STREAM, 50), None, chunked(STREAM, 50)) as (client, sockets):
        assert (await ask(client)).is_complete
        assert (await ask(client)).is_complete
        assert sockets == [2, 1]


@pytest.mark.parametrize(
    "close", [{"close_after_events": 0}, {"close_after_events": 1}, {"close_after_s": 0.0}]
)
async def test_a_close_on_purpose_is_no_error_and_the_request_was_sent(
    close: dict[str, Any],
) -> None:
    # the first request opens the connection, so that the server surely sees the second
    async with a_server(chunked(STREAM, 50), chunked(STREAM, 50)) as (client, sockets):
        assert (await ask(client)).is_complete
        answer = await ask(client, **close)
        assert answer.is_cancelled, answer
        assert answer.error is None
    assert sockets == [2]


def test_metrics_are_read_by_series_and_summed_by_name() -> None:
    text = '# TYPE a counter\na{m="x y"} 1\na{m="z"} 2.5\nb 4\n\n'
    assert read_metrics(text) == {'a{m="x y"}': 1, 'a{m="z"}': 2.5, "a": 3.5, "b": 4}
