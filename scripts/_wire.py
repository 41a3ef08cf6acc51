"""HTTP/1.1 responses and server-sent events, parsed as their bytes come in.

Pure: knows no sockets, no clocks and no JSON. Written for the load test, whose processor time
is taken from the server that it measures. Deliberately leaves out compression, pipelining and
bare CR line ends.
"""

from __future__ import annotations

from enum import Enum, auto

#: far above any honest header or event; a server that sends more is broken
HEAD_BYTES_MAX = 64 * 1024
EVENT_BYTES_MAX = 16 * 2**20


class MalformedResponse(Exception):
    """The server sent what is not HTTP/1.1 or not an event stream."""


class _State(Enum):
    HEAD = auto()
    LENGTH = auto()
    CHUNK_SIZE = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()
    TRAILERS = auto()
    UNTIL_CLOSE = auto()
    COMPLETE = auto()


class ResponseParser:
    """One response; ``feed`` returns the body bytes that the fed bytes completed.

    ``status`` is 0 until the head is complete.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keeps_alive = False
        self._state = _State.HEAD
        self._buffer = bytearray()
        #: body bytes still to come, of the response or of the chunk
        self._remaining = 0

    @property
    def is_complete(self) -> bool:
        return self._state is _State.COMPLETE

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        pieces: list[bytes] = []
        while self._buffer and self._step(pieces):
            pass
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def feed_eof(self) -> None:
        """The server closed; raises unless that is how this response ends."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.COMPLETE
        if self._state is not _State.COMPLETE:
            raise MalformedResponse("the connection closed in the middle of the response")

    def _step(self, pieces: list[bytes]) -> bool:
        """Take one element off the buffer; False when more bytes are needed."""
        match self._state:
            case _State.CHUNK_DATA | _State.LENGTH:
                self._take_body(pieces)
                return True
            case _State.CHUNK_END:
                if len(self._buffer) < 2:
                    return False
                if self._buffer[:2] != b"\r\n":
                    raise MalformedResponse("no line end after a chunk")
                del self._buffer[:2]
                self._state = _State.CHUNK_SIZE
                return True
            case _State.CHUNK_SIZE:
                return self._take_chunk_size()
            case _State.HEAD:
                return self._take_head()
            case _State.TRAILERS:
                line = self._take_line()
                if line == b"":
                    self._state = _State.COMPLETE
                return line is not None
            case _State.UNTIL_CLOSE:
                pieces.append(bytes(self._buffer))
                self._buffer.clear()
                return True
            case _State.COMPLETE:
                raise MalformedResponse("bytes after the end of the response")

    def _take_body(self, pieces: list[bytes]) -> None:
        count = min(self._remaining, len(self._buffer))
        pieces.append(bytes(self._buffer[:count]))
        del self._buffer[:count]
        self._remaining -= count
        if self._remaining == 0:
            in_chunk = self._state is _State.CHUNK_DATA
            self._state = _State.CHUNK_END if in_chunk else _State.COMPLETE

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise MalformedResponse(f"a line of more than {HEAD_BYTES_MAX} bytes")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _take_chunk_size(self) -> bool:
        line = self._take_line()
        if line is None:
            return False
        digits = line.partition(b";")[0].strip()
        # int() alone would also take a sign, an underscore or a 0x
        if not digits or digits.strip(b"0123456789abcdefABCDEF"):
            raise MalformedResponse(f"chunk size {line[:40]!r} is not hexadecimal")
        self._remaining = int(digits, 16)
        self._state = _State.CHUNK_DATA if self._remaining else _State.TRAILERS
        return True

    def _take_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise MalformedResponse(f"a head of more than {HEAD_BYTES_MAX} bytes")
            return False
        status_line, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = status_line.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not rest[:3].isdecimal():
            raise MalformedResponse(f"status line {status_line[:80]!r} is not HTTP/1.1")
        status = int(rest[:3])
        if 100 <= status < 200:
            return True  # an interim response: the real one follows
        self.status = status
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        connection = self.headers.get("connection", "").lower()
        self.keeps_alive = version == "HTTP/1.1" and "close" not in connection
        self._start_body()
        return True

    def _start_body(self) -> None:
        length = self.headers.get("content-length")
        if self.status in (204, 304):
            self._state = _State.COMPLETE
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._state = _State.CHUNK_SIZE
        elif length is None:
            self._state = _State.UNTIL_CLOSE
            self.keeps_alive = False
        elif not length.isdecimal():
            raise MalformedResponse(f"content-length {length[:40]!r} is not a number")
        else:
            self._remaining = int(length)
            self._state = _State.LENGTH if self._remaining else _State.COMPLETE


class EventParser:
    """Server-sent events; ``feed`` returns the data of each event that the bytes completed.

    Comments and all fields but ``data`` are ignored.
    """

    def __init__(self) -> None:
        self._partial_line = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._partial_line + data).split(b"\n")
        self._partial_line = lines.pop()
        if len(self._partial_line) > EVENT_BYTES_MAX:
            raise MalformedResponse(f"an event of more than {EVENT_BYTES_MAX} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data.clear()
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events
