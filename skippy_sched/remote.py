"""Asks a running daemon: one GET, its JSON, and its refusals in one line.

Knows HTTP as a client. The key is taken from the environment, so that it is in no process list.
"""

from __future__ import annotations

import json
import os
import socket
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from skippy_sched.errors import RemoteError

KEY_VARIABLE = "SKIPPY_SCHED_KEY"
#: The daemon answers these from its books; longer means that it does not answer at all.
TIMEOUT_S = 10.0


def get(url: str, path: str) -> Any:
    """The JSON at ``path`` of the daemon at ``url``; raises RemoteError."""
    connection, base = _connection(url)
    key = os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request("GET", base + path, headers=headers)
        response = connection.getresponse()
        status, body = response.status, response.read()
    except OSError as error:
        raise RemoteError(f"no daemon answers at {url}: {error}; is it running?") from None
    except HTTPException:
        raise RemoteError(f"what answers at {url} is not skippy-sched") from None
    finally:
        connection.close()
    if status != HTTPStatus.OK:
        raise RemoteError(_refusal(status, body, url))
    try:
        return json.loads(body)
    except ValueError:
        raise RemoteError(f"what answers at {url} is not skippy-sched") from None


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(url: str) -> tuple[HTTPConnection, str]:
    """And what comes before every path."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RemoteError(f"{url!r} is not a URL: {error}") from None
    if parts.scheme == "unix" and parts.path:
        return _UnixConnection(parts.path), ""
    kind = {"http": HTTPConnection, "https": HTTPSConnection}.get(parts.scheme)
    if kind is None or not parts.hostname:
        raise RemoteError(
            f"{url!r} is not a URL such as http://127.0.0.1:8080 or unix:/run/skippy.sock"
        )
    return kind(parts.hostname, port, timeout=TIMEOUT_S), parts.path.rstrip("/")


def _refusal(status: int, body: bytes, url: str) -> str:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"what answers at {url} is not skippy-sched (status {status})"
    if status in (401, 403):
        message += f"; give a key in {KEY_VARIABLE}"
    return message
